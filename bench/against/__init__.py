"""phloem beside the engines that people would pick instead, at equal precision: `python -m bench.against`."""
