"""PageError: a request that gets an error page, with the text that says what to do."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.exceptions import HTTPException

if TYPE_CHECKING:
    from collections.abc import Mapping


class PageError(HTTPException):
    """A request that gets an error page."""

    def __init__(
        self, status: int, problem: str, advice: str, headers: Mapping[str, str] | None = None
    ) -> None:
        """Create the error.

        Args:
            status: the HTTP status.
            problem: what is wrong, as a short sentence.
            advice: what the reader can do.
            headers: headers of the response.
        """
        super().__init__(status, problem, headers)
        self.problem, self.advice = problem, advice
