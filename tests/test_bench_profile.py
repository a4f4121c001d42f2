"""Kernels are told apart by name."""

import re
from pathlib import Path

import pytest
import torch

import octavo
from octavo.bench.profile import by_kind, kind_of, profile


@pytest.mark.parametrize(
    "name,kind",
    [
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_6", "attention"),
        ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128>>", "attention"),
        ("nvjet_qqtst_128x256_128x5_1x2_h_bz_coopA_NNT", "FP8 GEMMs"),
        ("sm90_xmma_gemm_e5m2bf16_e4m3f32_f32_tn_n_tilesize128x128x128", "FP8 GEMMs"),
        ("nvjet_tst_128x256_64x4_2x1_v_bz_coopA_TNN", "BF16 GEMMs"),
        ("_adamw", "optimizer"),
        ("_quantize_kernel", "octavo's other kernels"),
        ("_rotary_kernel", "octavo's other kernels"),
        ("_add_parts", "optimizer"),
        ("void at::native::vectorized_layer_norm_kernel<float>", "other"),
        ("triton_poi_fused_add_mul_3", "other"),
    ],
)
def test_kinds(name, kind):
    assert kind_of(name) == kind


def test_every_kernel_of_a_layer_is_octavos():
    sources = (Path(octavo.__file__).parent / "kernels/cuda").glob("*.py")
    names = {name for path in sources for name in re.findall(r"^def (\w+_kernel)\(", path.read_text(), re.MULTILINE)}
    assert {"cast_kernel", "_add_parts_kernel"} < names
    assert {name: kind_of(name) for name in names} == dict.fromkeys(names, "octavo's other kernels")


def test_sums():
    assert by_kind([("_adamw", 1.0), ("fill", 2.0), ("_adamw", 3.0)]) == {"optimizer": 4.0, "other": 2.0}


@pytest.mark.gpu
def test_the_sum_is_the_time_of_a_call_that_keeps_the_gpu_busy():
    from octavo.bench.timing import measure

    x = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    timing = measure(lambda: x @ x, torch.device("cuda"), repeats=10)
    found = profile(lambda: x @ x)
    assert list(found) == ["BF16 GEMMs"]
    assert found["BF16 GEMMs"] == pytest.approx(timing.ms, rel=0.2)
