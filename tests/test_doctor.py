"""The report tells the truth about this machine, names a remedy for whatever is wrong, and never raises."""

from __future__ import annotations

import pytest
import torch

from octavo import doctor, kernels
from octavo.convert import break_even
from octavo.doctor import Check, diagnose


def by_name(checks: list[Check]) -> dict[str, Check]:
    return {check.name: check for check in checks}


def test_this_machine(seed):
    checks = by_name(diagnose())
    assert {"PyTorch", "GPU", "FP8 GEMM", "FP8 cast", "attention", "memory", "break-even", "training tools"} <= set(
        checks
    )
    assert torch.__version__ in checks["PyTorch"].detail
    assert checks["FP8 GEMM"].ok, checks["FP8 GEMM"].detail
    assert checks["FP8 cast"].ok, checks["FP8 cast"].detail
    for check in checks.values():
        assert check.ok or check.remedy, f"{check.name} names no remedy"


def test_exit_code_and_report(monkeypatch, capsys):
    good, bad = Check("one", True, "fine"), Check("other", False, "broken", "repair it")
    monkeypatch.setattr(doctor, "diagnose", lambda: [good])
    assert doctor.main() == 0
    assert "Everything works." in capsys.readouterr().out
    monkeypatch.setattr(doctor, "diagnose", lambda: [good, bad])
    assert doctor.main() == 1
    out = capsys.readouterr().out
    assert "broken" in out and "repair it" in out and "1 of 2 checks need a change: other" in out


def test_wrong_product_is_found(seed, monkeypatch):
    right = kernels.scaled_mm_nt

    def wrong(*args, **kwargs):
        product = right(*args, **kwargs)
        product[0] += product.abs().max()
        return product

    monkeypatch.setattr(kernels, "scaled_mm_nt", wrong)
    check = by_name(diagnose())["FP8 GEMM"]
    assert not check.ok and check.remedy


def test_one_wrong_code_is_found(seed, monkeypatch):
    right = kernels.cast

    def wrong(x, *args, **kwargs):
        codes = right(x, *args, **kwargs)
        codes.view(torch.uint8)[7] ^= 1
        return codes

    monkeypatch.setattr(kernels, "cast", wrong)
    check = by_name(diagnose())["FP8 cast"]
    assert not check.ok and "differ" in check.detail


def test_a_check_that_raises_is_reported(monkeypatch):
    def broken(*args, **kwargs):
        raise RuntimeError("driver says no")

    monkeypatch.setattr(kernels, "scaled_mm_nt", broken)
    checks = by_name(diagnose())
    assert not checks["FP8 GEMM"].ok and "driver says no" in checks["FP8 GEMM"].detail
    assert checks["FP8 cast"].ok


@pytest.mark.parametrize(
    ("version", "minimum", "enough"),
    [
        ("2.11.0+cu130", (2, 11), True),
        ("2.9.1", (2, 11), False),
        ("3.0.0a0+git1", (2, 11), True),
        ("2.11.0rc1", (2, 11), True),
        ("3.6.0", (3, 6), True),
        ("2.10", (2, 11), False),
    ],
)
def test_versions_compare_as_numbers(version, minimum, enough):
    assert doctor._at_least(version, minimum) is enough


@pytest.mark.parametrize(
    ("capability", "ok", "words"),
    [((8, 0), False, "no FP8 tensor cores"), ((8, 9), True, "tuned for Hopper"), ((9, 0), True, "FP8 tensor cores")],
)
def test_gpu_by_compute_capability(monkeypatch, capability, ok, words):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    check = doctor._gpu()
    assert check.ok is ok and words in check.detail and bool(check.remedy) is not ok


def test_break_even_where_it_was_measured(monkeypatch, tmp_path):
    assert "without a GPU" in doctor._break_even().detail or torch.cuda.is_available()
    path = tmp_path / "table.csv"
    lines = [
        f"{kind},a device,eager,{n},{d},{d},{d},512" for kind in ("cpu", "9.0") for n in (64, 128) for d in (256, 512)
    ]
    path.write_text("\n".join(["capability,device,mode,tokens,inputs,outputs,bf16_us,fp8_us", *lines]))
    monkeypatch.setattr(break_even, "MEASURED", path)
    check = doctor._break_even()
    assert check.ok and check.detail.endswith(
        "(a device) in square layers, eager: at 64 tokens from d = 512, at 128 tokens from d = 512"
    )


def test_break_even_of_a_gpu_that_was_not_measured(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (99, 0))
    check = doctor._break_even()
    assert check.ok and "octavo bench --break-even" in check.detail


def test_old_torch_is_refused(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.9.1")
    check = doctor._torch()
    assert not check.ok and "2.11" in check.remedy


@pytest.mark.gpu
def test_gpu_machine_reports_its_libraries(seed):
    checks = by_name(diagnose())
    assert checks["Triton"].ok and checks["GPU"].ok
    assert torch.cuda.get_device_name() in checks["GPU"].detail
