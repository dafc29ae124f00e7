"""PageError: an error that the user sees as an error page with advice."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.exceptions import HTTPException

if TYPE_CHECKING:
    from collections.abc import Mapping


class PageError(HTTPException):
    """An error that the user sees as an error page with advice."""

    def __init__(
        self, status: int, problem: str, advice: str, headers: Mapping[str, str] | None = None
    ) -> None:
        """Create the error.

        Args:
            status: the HTTP status.
            problem: the problem, as a short sentence.
            advice: what the user can do.
            headers: additional headers of the response.
        """
        super().__init__(status, problem, headers)
        self.problem, self.advice = problem, advice
