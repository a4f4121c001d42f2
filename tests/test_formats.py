"""The constants of each format against the format itself: all of its values, enumerated."""

import copy
import pickle

import pytest
import torch

from octavo.formats import BF16, E4M3, E5M2, FORMATS, FP16, FP32, Format, NumericsError


def all_values(fmt: Format) -> torch.Tensor:
    """All finite positive values of an 8- or 16-bit format, FP64, ascending."""
    words = torch.arange(2 ** (fmt.bits - 1), dtype=torch.int32)
    words = words.to(torch.uint8) if fmt.bits == 8 else words.to(torch.int16)
    values = words.view(fmt.dtype).double()
    return values[values.isfinite() & (values > 0)]


@pytest.mark.parametrize("fmt", [E4M3, E5M2, FP16, BF16], ids=repr)
def test_constants_match_the_values(fmt):
    values = all_values(fmt)
    assert torch.equal(values, values.sort().values)
    assert values[-1] == fmt.max
    assert values[0] == fmt.smallest
    normal = values[values >= fmt.tiny]
    assert normal[0] == fmt.tiny
    assert len(values) - len(normal) == 2**fmt.mantissa_bits - 1
    assert (values[: 2**fmt.mantissa_bits].diff() == fmt.smallest).all()
    one = torch.searchsorted(values, torch.tensor(1.0, dtype=torch.float64))
    assert values[one] == 1 and values[one + 1] == 1 + fmt.eps


def test_fp32_constants():
    info = torch.finfo(torch.float32)
    assert (FP32.max, FP32.tiny, FP32.smallest, FP32.eps) == (
        info.max,
        info.tiny,
        info.smallest_normal * info.eps,
        info.eps,
    )
    assert FP32.bits == 32


def test_published_numbers():
    assert (E4M3.max, E4M3.tiny, E4M3.smallest) == (448, 2**-6, 2**-9)
    assert (E5M2.max, E5M2.tiny, E5M2.smallest) == (57344, 2**-14, 2**-16)
    assert (FP16.max, FP16.tiny, FP16.smallest) == (65504, 2**-14, 2**-24)


def test_D4_code_table_has_256_codes():
    """bitsandbytes#152: a code table with entries missing trained to NaN."""
    from octavo.kernels.reference.cast import code_values

    for fmt, finite, nans in ((E4M3, 254, 2), (E5M2, 248, 6)):
        table = code_values(fmt.dtype)
        assert table.shape == (256,) and table.isfinite().sum() == finite and table.isnan().sum() == nans
        assert torch.equal(
            table.nan_to_num(0), torch.arange(256, dtype=torch.uint8).view(fmt.dtype).float().nan_to_num(0)
        )
        # Each value once, except that zero has two signs.
        assert len(table[table.isfinite()].unique()) == finite - 1
        assert (table[:128][table[:128].isfinite()].diff() > 0).all()


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=repr)
def test_formats_are_singletons(fmt):
    assert Format.of(fmt.dtype) is fmt
    assert copy.deepcopy(fmt) is fmt
    assert pickle.loads(pickle.dumps(fmt)) is fmt
    assert FORMATS[repr(fmt)] is fmt


def test_unknown_dtype_names_the_known_ones():
    with pytest.raises(ValueError, match="torch.int8 is no format of octavo.*float8_e4m3fn"):
        Format.of(torch.int8)


def test_numerics_error_is_arithmetic():
    assert issubclass(NumericsError, ArithmeticError)
