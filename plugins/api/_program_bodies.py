"""Bodies of the program routes, and what is refused of them before anything is made or waited for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import Field

from phloem.choosing import METHODS
from phloem.errors import RequestError
from phloem.interfaces import Service

from ._body import Body
from ._params import check_token_ids
from ._program_run import Way
from ._program_text import Added
from ._sampling import FIELDS, RENAMED
from ._schema import Int, TokenId

MAX_CHOICES = 1024


class TextBody(Body):
    """What an operation appends before anything else. It stays if the operation succeeds."""

    text: str | None = None
    add_special_tokens: bool | None = Field(
        None, description="false: the tokenizer puts nothing before the text. Counts for a program's first text only."
    )

    @property
    def added(self) -> Added:
        """The text. Raises RequestError for what is not Unicode."""
        text = self.text or ""
        bad = next((char for char in text if "\ud800" <= char <= "\udfff"), None)
        if bad is not None:
            raise RequestError(f"the text has a lone surrogate (U+{ord(bad):04X})", param="text")
        return Added(text, self.add_special_tokens is False)


class AppendBody(TextBody):
    """POST /v1/programs/{id}/append: one of text and token_ids."""

    token_ids: list[TokenId] | None = None

    def check(self, service: Service, *, required: bool) -> None:
        """Refuse what cannot be appended. Raises RequestError."""
        if self.text is not None and self.token_ids is not None:
            raise RequestError("text and token_ids are given together", hint="give one of them", param="token_ids")
        if required and self.text is None and self.token_ids is None:
            raise RequestError("give text or token_ids", param="text")
        _ = self.added
        check_token_ids(self.token_ids or [], service.info, "token_ids")


class ResultBody(TextBody):
    """What operations with a result have in common."""

    name: str | None = Field(None, description="The variable that keeps the result.")
    append: bool | None = Field(None, description="false: the result does not join the text.")

    @property
    def way(self) -> Way:
        """How the operation goes about the text."""
        return Way(self.added, self.append is not False, self.name)


class GenerateBody(ResultBody):
    """POST /v1/programs/{id}/generate."""

    renamed: ClassVar[Mapping[str, str]] = RENAMED

    sampling_params: dict[str, Any] | None = Field(None, description=FIELDS)
    stream: bool | None = None


class SelectBody(ResultBody):
    """POST /v1/programs/{id}/select."""

    choices: list[str]
    method: str | None = Field(None, description="One of: " + ", ".join(METHODS))
    temperature: float | Int | None = Field(None, description="0: the best choice; above, one drawn by its score.")

    def check(self) -> None:
        """Refuse numbers out of range. Raises RequestError."""
        if not 0 < len(self.choices) <= MAX_CHOICES:
            problem = f"choices must have 1 to {MAX_CHOICES} entries, got {len(self.choices)}"
            raise RequestError(problem, param="choices")
        if not 0 <= (self.temperature or 0.0) <= 100:
            raise RequestError(f"temperature must be in [0, 100], got {self.temperature:g}", param="temperature")


class ForkBody(TextBody):
    """POST /v1/programs/{id}/fork."""

    n: Int

    def check(self) -> None:
        """Refuse a fork without branches. Raises RequestError."""
        if self.n < 1:
            raise RequestError(f"n must be at least 1, got {self.n}", param="n")


class ProgramBody(AppendBody):
    """POST /v1/programs: what calls of the program have in common, its first text and its first operation, if any."""

    id: str | None = Field(
        None,
        pattern=r"^[A-Za-z0-9_-]{16,64}$",
        description="The program's id, if its maker chooses one. Whoever knows it may use the program.",
    )
    salt: str | None = None
    priority: Int | None = None
    group: str | None = Field(
        None, description="Programs of one group wait for each other's prefixes, as the forks of one program do."
    )
    idle_s: float | Int | None = Field(None, description="Seconds without use after which the program is forgotten.")
    generate: GenerateBody | None = Field(None, description="Its first operation: the body of that route.")
    select: SelectBody | None = Field(None, description="Its first operation: the body of that route.")
    fork: ForkBody | None = Field(None, description="Its first operation: the body of that route.")

    @property
    def first(self) -> GenerateBody | SelectBody | ForkBody | None:
        """The first operation. Raises RequestError where several are given."""
        given = {"generate": self.generate, "select": self.select, "fork": self.fork}
        there = [(name, body) for name, body in given.items() if body is not None]
        if len(there) > 1:
            names = " and ".join(name for name, _ in there)
            raise RequestError(f"{names} are given together", hint="give one, and ask for the others of the program",
                               param=there[1][0])  # fmt: skip
        return there[0][1] if there else None

    def check(self, service: Service, *, required: bool) -> None:
        """Refuse what cannot be appended, and a first operation that cannot be done. Raises RequestError."""
        super().check(service, required=required)
        first = self.first
        if first is not None and not isinstance(first, GenerateBody):
            first.check()


class DeleteBody(Body):
    """POST /v1/programs/delete."""

    ids: list[str]
