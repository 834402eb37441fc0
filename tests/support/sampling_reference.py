"""Sampling as one would write it down: one row, one token at a time, Python integers. Slow, and obviously right."""

import numpy as np

from maitred.core.request import SamplingParams
from maitred.engine.sampling.fixed_point import LOG2_E, POLYNOMIAL

F32 = np.float32


def philox(counter: list[int], key: list[int]) -> list[int]:
    low = 0xFFFFFFFF
    for _ in range(10):
        a, b = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
        counter = [(b >> 32) ^ counter[1] ^ key[0], b & low, (a >> 32) ^ counter[3] ^ key[1], a & low]
        key = [(key[0] + 0x9E3779B9) & low, (key[1] + 0xBB67AE85) & low]
    return counter


def bits_of(params: SamplingParams, choice: int, position: int) -> int:
    return philox([position, choice, 0, 0], [params.seed & 0xFFFFFFFF, params.seed >> 32])[0]


def weights(row: np.ndarray, temperature: float) -> list[int]:
    top = row.max()
    scale = F32(LOG2_E / temperature)
    result = []
    for x in row:
        exponent = max((x - top) * scale, F32(-62.0))
        whole = int(F32(0.5) - exponent)
        f = exponent + F32(whole)
        power = F32(0)
        for coefficient in reversed(POLYNOMIAL):
            power = power * f + F32(coefficient)
        result.append(int(float(power) * 2**40) >> whole)
    return result


def kept(weighed: list[int], params: SamplingParams) -> list[int]:
    """The tokens that the filters keep, most probable first."""
    order = sorted(range(len(weighed)), key=lambda token: (-weighed[token], token))
    if params.top_k > 0:
        order = order[: params.top_k]
    if params.top_p < 1:
        share = int(np.ceil(params.top_p * 2**32))
        target = sum(weighed[token] for token in order) * share >> 32
        nucleus, mass = [], 0
        for token in order:
            if nucleus and mass >= target:
                break
            nucleus.append(token)
            mass += weighed[token]
        order = nucleus
    least = int(np.ceil(params.min_p * 2**40))
    return [token for token in order if weighed[token] >= least]


def draw(row: np.ndarray, params: SamplingParams, bits: int) -> int:
    if params.temperature < 1e-5 or row.max() == -np.inf:
        return int(np.flatnonzero(row == row.max())[0])
    weighed = weights(row, params.temperature)
    tokens = sorted(kept(weighed, params))
    target = sum(weighed[token] for token in tokens) * bits >> 32
    for token in tokens:
        target -= weighed[token]
        if target < 0:
            return token
    raise AssertionError("no token")


def edited(row: np.ndarray, params: SamplingParams, prompt: list[int], output: list[int], eos: list[int]) -> np.ndarray:
    row = row.copy()
    for token in range(row.size):
        count = output.count(token)
        x = row[token]
        if count or token in prompt:
            x = x / F32(params.repetition_penalty) if x > 0 else x * F32(params.repetition_penalty)
        x = x - F32(count) * F32(params.frequency_penalty)
        if count:
            x = x - F32(params.presence_penalty)
        row[token] = x + F32(params.logit_bias.get(token, 0.0))
    if len(output) < params.min_tokens:
        for token in [*params.stop_token_ids, *([] if params.ignore_eos else eos)]:
            row[token] = -np.inf
    if params.allowed_token_ids:
        row[[token for token in range(row.size) if token not in params.allowed_token_ids]] = -np.inf
    for *begun, last in params.bad_words_token_ids:
        if output[len(output) - len(begun) :] == begun and last < row.size:
            row[last] = -np.inf
    return row
