"""A GGUF file in another type: runs in the environment of llama.cpp, whose library rounds the numbers.

    python -m benchmarks.support.rivals.gguf_files SOURCE TYPE TARGET

All matrices get the type, norms stay as they are, and so does the metadata.
"""

import sys
from pathlib import Path
from typing import Any

import gguf

_NOT_COPIED = ("general.architecture", "general.file_type", "general.quantization_version")


def write(source: Path, type_name: str, target: Path) -> None:
    """Writes the file; it appears whole."""
    kind = gguf.GGMLQuantizationType[type_name]
    reader: Any = gguf.GGUFReader(source)
    unfinished = target.with_suffix(".unfinished")
    writer: Any = gguf.GGUFWriter(unfinished, reader.get_field("general.architecture").contents())
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name in _NOT_COPIED:
            continue
        inner = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), field.types[0], sub_type=inner)
    for tensor in reader.tensors:
        numbers = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        plain = tensor.tensor_type == gguf.GGMLQuantizationType.F32 or kind == gguf.GGMLQuantizationType.F32
        if plain:
            writer.add_tensor(tensor.name, numbers)
        else:
            writer.add_tensor(tensor.name, gguf.quants.quantize(numbers, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    unfinished.rename(target)


if __name__ == "__main__":
    write(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
