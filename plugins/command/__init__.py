"""Commands of the `phloem` program, one module each; imported only when called."""
