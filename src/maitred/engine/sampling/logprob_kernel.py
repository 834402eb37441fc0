"""Log-probabilities of a row, found in one compiled pass on a CPU.

The normaliser is the same exact sum of integer weights that sampling uses. So a log-probability does not depend on the
batch, like a token. To find the most probable tokens, only blocks whose largest logit can still enter the list are
scanned. After the first few blocks, almost none qualifies.
"""

# In compiled code an `int` is NumPy's int64, which mypy treats as a different type.
# mypy: disable-error-code="assignment, arg-type"

import numpy as np
from numpy.typing import NDArray

from maitred.engine.compiled import compiled
from maitred.engine.sampling.fixed_point import LOG2_E, ONE
from maitred.engine.sampling.row_kernels import BLOCK_TOKENS, find_block_tops, weigh_blocks

_SCALE = np.float32(LOG2_E)


@compiled
def observe_row(row: NDArray[np.float32], tokens: NDArray[np.int64], values: NDArray[np.float64]) -> float:
    """Computes the logarithm of the sum of the exponentials of a row's logits.

    Args:
        row: The logits.
        tokens: Receives the most probable tokens, up to its size; among equal logits the lower id is first.
        values: Receives their logits.

    Returns:
        Value to subtract from a logit to get its log-probability; NaN if the row contains a NaN or +inf.
    """
    blocks = (row.size + BLOCK_TOKENS - 1) // BLOCK_TOKENS
    patterns = np.empty(blocks, np.int32)
    if not find_block_tops(row.view(np.int32), patterns):
        values[:] = np.nan
        return np.nan
    tops = patterns.view(np.float32)
    top = tops.max()
    count = 0
    for block in range(blocks if tokens.size else 0):
        if count == tokens.size and tops[block] <= values[count - 1]:
            continue
        start = block * BLOCK_TOKENS
        for token in range(start, min(start + BLOCK_TOKENS, row.size)):
            x = row[token]
            if count == tokens.size and x <= values[count - 1]:
                continue
            place = count if count < tokens.size else count - 1
            while place > 0 and values[place - 1] < x:
                tokens[place] = tokens[place - 1]
                values[place] = values[place - 1]
                place -= 1
            tokens[place] = token
            values[place] = x
            count = min(count + 1, tokens.size)
    if top == -np.inf:
        return 0.0
    return float(top + np.log(weigh_blocks(row, tops, top, _SCALE, np.empty(blocks, np.int64)) / ONE))


@compiled
def score_rows(
    logits: NDArray[np.float32],
    targets: NDArray[np.int64],
    logprobs: NDArray[np.float32],
    ranks: NDArray[np.int32],
    top_tokens: NDArray[np.int32],
    top_logprobs: NDArray[np.float32],
) -> None:
    """Computes the log-probability and the rank of one token of each row, and the most probable tokens.

    Args:
        logits: ``[rows, vocabulary]``
        targets: One token per row.
        logprobs: Receives their log-probabilities; NaN for a row that contains a NaN or +inf.
        ranks: Receives one more than the number of tokens with a larger logit.
        top_tokens: ``[rows, top]``; receives the most probable tokens, best first.
        top_logprobs: ``[rows, top]``; receives their log-probabilities.
    """
    top = top_tokens.shape[1]
    tokens = np.empty(top, np.int64)
    values = np.empty(top, np.float64)
    for index in range(targets.size):
        row = logits[index]
        normaliser = observe_row(row, tokens, values)
        own = row[targets[index]]
        above = 0
        for i in range(row.size):  # an iterator over the row would not be compiled to vector instructions
            above += row[i] > own
        logprobs[index] = own - normaliser
        ranks[index] = above + 1
        for place in range(top):
            top_tokens[index, place] = tokens[place]
            top_logprobs[index, place] = values[place] - normaliser
