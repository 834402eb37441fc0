import pytest
import torch

from maitred.engine.kernels.norm import add_norm, add_norm_fused, make_add_norm


@pytest.mark.parametrize(("rows", "columns"), [(1, 256), (33, 896), (0, 64), (5, 7)])
def test_the_fused_pass_equals_the_specification(rows, columns):
    generator = torch.Generator().manual_seed(rows)
    stream, addend = (torch.randn(rows, columns, generator=generator) for _ in range(2))
    gain = torch.randn(columns, generator=generator)
    expected_stream = stream.clone()
    expected = add_norm(expected_stream, addend, gain, 1e-5)
    normalised = add_norm_fused(stream, addend, gain, 1e-5)
    torch.testing.assert_close(normalised, expected)
    torch.testing.assert_close(stream, expected_stream, rtol=0, atol=0)


def test_a_row_does_not_depend_on_the_others():
    generator = torch.Generator().manual_seed(0)
    stream, addend = (torch.randn(40, 256, generator=generator) for _ in range(2))
    gain = torch.randn(256, generator=generator)
    together = add_norm_fused(stream.clone(), addend, gain, 1e-5)
    for row in (0, 17, 39):
        alone = add_norm_fused(stream[row : row + 1].clone(), addend[row : row + 1], gain, 1e-5)
        assert torch.equal(alone[0], together[row])


def test_only_fp32_on_a_cpu_is_fused():
    assert make_add_norm(torch.float32, torch.device("cpu")) is add_norm_fused
    assert make_add_norm(torch.bfloat16, torch.device("cpu")) is add_norm
    assert make_add_norm(torch.float32, torch.device("cuda")) is add_norm
