"""A model's format of calls and thoughts as data: what constrains it, reads it and writes it is derived from this."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from ._call import Body
from ._source import Markers


@dataclass(frozen=True)
class Form:
    """One way in which calls are written: begin, then opening, body, closing for each, a separator between, and end.

    White space in these texts is written as it stands, and any, or none, is read for it.
    """

    body: Body
    begin: str = ""
    opening: str = ""
    closing: str = ""
    separator: str = ""
    end: str = ""
    stop: str = ""  # an end-of-sequence token that may follow: read where it comes, never written or asked for
    plain: bool = False  # no marker tells calls from text
    line_start: bool = False  # calls begin at the start of a line
    variant: bool = False  # read, but never asked for
    marker: str = ""  # what calls are found by in a text: by default the first word of their beginning

    def __post_init__(self) -> None:
        start = self.begin or self.opening or self.body.around("")[0][:1]
        object.__setattr__(self, "marker", self.marker or start.split()[0])

    @cached_property
    def cut(self) -> str:
        """The marker that ends a call, where JSON outside of strings cannot have it; "" if there is none."""
        return self.closing[self.closing.find("<") :].strip() if "<" in self.closing else ""

    def text(self, calls: Sequence[tuple[str, str]]) -> str:
        """Calls, (name, JSON text of the arguments) each, as the model writes them."""
        written = []
        for name, arguments in calls:
            before, after = self.body.around(name)
            written.append(f"{self.opening}{before}{self.body.syntax.spell(arguments, name)}{after}{self.closing}")
        return self.begin + self.separator.join(written) + self.end


@dataclass(frozen=True)
class Format:
    """A format: forms of calls, the first of which is written, and the texts around a thought."""

    forms: tuple[Form, ...] = ()
    think: tuple[str, str] | None = None
    single: bool = False  # a call ends the answer, so there is only one

    @cached_property
    def markers(self) -> Markers:
        """What may begin calls."""
        return Markers(form.marker for form in self.forms)
