"""The language beside other ways of running the same programs; see bench/README.md."""
