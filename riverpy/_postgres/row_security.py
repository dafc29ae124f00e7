"""RowSecurity: the tables whose rows PostgreSQL's row-level security hides from the role."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence


class RowSecurity(NamedTuple):
    """The tables of riverpy in which the server hides rows from the role. It raises no error."""

    role: str
    hidden: Sequence[str]
    """The tables without a policy: the role sees no row of them."""
    filtered: Sequence[str]
    """The tables with policies that may not allow every row."""

    @property
    def tables(self) -> list[str]:
        """All of them."""
        return sorted([*self.hidden, *self.filtered])

    @property
    def problem(self) -> str:
        """What happens, in one sentence, if there are `tables`."""
        effect = (
            "without a policy no job is worked or counted"
            if self.hidden
            else "jobs that no policy allows are neither worked nor counted"
        )
        return (
            f'row-level security applies to "{self.role}" on {", ".join(self.tables)}: {effect}, '
            "and no error is raised"
        )

    @property
    def fix(self) -> str:
        """What to do."""
        return (
            "for each table ALTER TABLE … DISABLE ROW LEVEL SECURITY, or CREATE POLICY … TO "
            f'"{self.role}" USING (true); or let the role own the tables'
        )
