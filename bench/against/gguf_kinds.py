"""A GGUF file with its matrices stored as another kind: `python -m bench.against.gguf_kinds IN.gguf OUT.gguf Q8_0`.

With the quantisers of the gguf library, which round as llama.cpp's own do. Vectors and metadata stay as they are.
"""

from __future__ import annotations

import sys
from pathlib import Path

import gguf
import numpy as np

# llama.cpp's number for a file that is mostly of the kind; without it the file is taken for what it was.
FILE_TYPES = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "BF16": 32}
_WRITTEN_ANEW = ("general.architecture", "general.file_type", "general.quantization_version")


def convert(source: Path, target: Path, kind: str) -> None:
    """Write `target`. Raises KeyError for a kind that is not one of FILE_TYPES."""
    file_type, wanted = FILE_TYPES[kind], gguf.GGMLQuantizationType[kind]
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, reader.get_field("general.architecture").contents())
    for each in reader.fields.values():
        if not each.name.startswith("GGUF.") and each.name not in _WRITTEN_ANEW:
            inner = each.types[-1] if each.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(each.name, each.contents(), each.types[0], sub_type=inner)
    writer.add_file_type(file_type)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    for tensor in reader.tensors:
        shape = tuple(int(size) for size in reversed(tensor.shape))
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32).reshape(shape)
        if len(shape) < 2:
            writer.add_tensor(tensor.name, values)
        else:
            writer.add_tensor(tensor.name, gguf.quants.quantize(values, wanted), raw_dtype=wanted)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
