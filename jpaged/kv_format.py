"""What a KV cache is kept in: the names that a user may give, and what each of them stands for.

The names are vLLM's, and `int8` in short for one of them.
"""

from typing import Literal, NamedTuple

from jpaged.errors import ConfigError

Scales = Literal["none", "tensor", "token_head"]
"""What stored numbers are multiplied by: nothing, a given number for each of a layer's K and V, or
a number for each token and KV head, computed when they are written."""

FLOATS = ("float32", "bfloat16", "float16")


class KVFormat(NamedTuple):
    """dtype: of the stored numbers, such as float8_e4m3fn, whatever holds their bits."""

    dtype: str
    scales: Scales = "none"

    @property
    def is_quantized(self) -> bool:
        """Whether there are 8 bits to a number."""
        return self.dtype not in FLOATS


FORMATS = {
    **{name: KVFormat(name) for name in FLOATS},
    "fp8_e4m3": KVFormat("float8_e4m3fn"),
    "fp8_e5m2": KVFormat("float8_e5m2"),
    "fp8_per_token_head": KVFormat("float8_e4m3fn", "token_head"),
    "int8_per_token_head": KVFormat("int8", "token_head"),
}
ALIASES = {"fp8": "fp8_e4m3", "int8": "int8_per_token_head"}
NAMES = ("auto", *ALIASES, *FORMATS)


def full_name(name: str, dtype: str) -> str:
    """The one name of a format: `auto` is the model's dtype, `fp8` is fp8_e4m3.

    Raises ConfigError for a name that is none of `NAMES`, or a model's dtype that KV can not have.
    """
    name = dtype if name == "auto" else ALIASES.get(name, name)
    if name not in FORMATS:
        raise ConfigError(f"kv_cache_dtype={name!r} is unknown; choose {' or '.join(NAMES)}")
    return name


def kv_format(name: str, dtype: str) -> KVFormat:
    """The format of a name, for a model that runs in `dtype`. Raises as `full_name`."""
    return FORMATS[full_name(name, dtype)]
