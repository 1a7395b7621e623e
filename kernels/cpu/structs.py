"""The structs and functions of layers.cpp, for ctypes. Tensors are passed as addresses."""

from __future__ import annotations

from ctypes import POINTER, Structure, c_double, c_float, c_int, c_int64, c_void_p

from torch import Tensor


def address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


class CProduct(Structure):
    _fields_ = (
        ("panels", c_void_p),
        ("panel_count", c_int64),
        ("outs", c_int64),
        ("ins", c_int64),
        ("bias", c_void_p),
        ("exact", c_int64),
        ("alike", c_int64),
    )


class CAttention(Structure):
    _fields_ = (
        ("heads", c_int64),
        ("kv_heads", c_int64),
        ("dim", c_int64),
        ("to_block", c_int64),
        ("to_value", c_int64),
        ("to_head", c_int64),
        ("block_tokens", c_int64),
        ("kv_bf16", c_int64),
        ("window", c_int64),
        ("scale", c_float),
    )


class CRows(Structure):
    _fields_ = (
        ("count", c_int64),
        ("tokens", c_int64),
        ("spans", c_void_p),
        ("tables", c_void_p),
        ("table_width", c_int64),
        ("slots", c_void_p),
        ("positions", c_void_p),
    )


class CLayer(Structure):
    _fields_ = (
        ("attention_norm", c_void_p),
        ("mlp_norm", c_void_p),
        ("qkv", CProduct),
        ("output", CProduct),
        ("gate_up", CProduct),
        ("down", CProduct),
        ("kv", CAttention),
        ("kv_data", c_void_p),
        ("group", c_int64),
    )


class CModel(Structure):
    _fields_ = (
        ("layers", c_void_p),
        ("layer_count", c_int64),
        ("hidden", c_int64),
        ("width", c_int64),
        ("frequencies", c_void_p),
        ("eps", c_float),
    )


SIGNATURES: dict[str, tuple[type | None, tuple[type, ...]]] = {
    "skerry_layers_bytes": (c_int64, (POINTER(CModel), c_int64, c_int)),
    "skerry_layers": (c_int64, (POINTER(CModel), POINTER(CRows), c_void_p, c_void_p, c_int)),
    "skerry_linear_bytes": (c_int64, (POINTER(CProduct), c_int64, c_int)),
    "skerry_linear": (c_int64, (POINTER(CProduct), c_int64, c_void_p, c_void_p, c_void_p, c_int)),
    "skerry_rows": (None, (c_int64, c_void_p, c_int64, c_int64, c_int64, c_void_p, c_void_p)),
    "skerry_rms_norm": (None, (c_int64, c_int64, c_void_p, c_void_p, c_float, c_void_p)),
    "skerry_peak": (c_double, ()),
    "skerry_silu_mul": (None, (c_int64, c_int64, c_void_p, c_void_p)),
    "skerry_attention_bytes": (c_int64, (POINTER(CAttention), c_int64, c_int)),
    "skerry_attention": (
        c_int64,
        (
            POINTER(CAttention), POINTER(CRows), c_void_p, c_void_p, c_void_p, c_void_p, c_void_p,
            c_int,
        ),
    ),
}  # fmt: skip
"""Result and arguments of each function."""
