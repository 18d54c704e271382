"""How every template of `phloem plugins new` begins: the module, and its class with options."""

from __future__ import annotations

HEAD = '''"""$cls: a plugin of kind `$kind`."""

from __future__ import annotations

'''
CLASS = '''

class $cls:
    """What it does, in one line: `phloem plugins` shows it."""

    api = 1
    capabilities: frozenset[str] = frozenset()

    class Options(BaseModel):
        """Options of `use: $name`; the text under a field is its documentation."""

        model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)
'''
