"""`python -m phloem`: the console script, found by metadata, since the core knows no command."""

from importlib.metadata import distribution

if __name__ == "__main__":
    (script,) = distribution("phloem").entry_points.select(group="console_scripts", name="phloem")
    raise SystemExit(script.load()())
