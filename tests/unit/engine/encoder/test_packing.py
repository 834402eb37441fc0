"""How texts of different lengths share a batch."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from maitred.engine.encoder.packing import group_by_length, pack

LENGTHS = st.lists(st.integers(1, 64), min_size=1, max_size=40)


@given(LENGTHS)
def test_every_text_is_in_one_group_and_little_is_padding(lengths):
    groups = group_by_length(lengths)
    assert sorted(index for group in groups for index in group) == list(range(len(lengths)))
    for group in groups:
        places = len(group) * max(lengths[index] for index in group)
        assert sum(lengths[index] for index in group) >= 0.75 * places


@given(LENGTHS)
def test_places_lead_back_to_the_rows_of_their_texts(lengths):
    texts = [[100 * index + offset for offset in range(length)] for index, length in enumerate(lengths)]
    batch = pack(texts, torch.device("cpu"))
    assert batch.tokens.tolist() == [token for text in texts for token in text]
    assert batch.positions.tolist() == [offset for length in lengths for offset in range(length)]
    assert batch.text_of.tolist() == [index for index, length in enumerate(lengths) for _ in range(length)]
    seen = []
    for group in batch.groups:
        side_by_side = batch.tokens[group.rows].view(group.texts, -1)
        for place, text in enumerate(side_by_side.tolist()):
            filled = [True] * len(text) if group.filled is None else group.filled[place, 0, 0].tolist()
            assert [token for token, real in zip(text, filled, strict=True) if real] == texts[text[0] // 100]
        assert batch.tokens[group.rows][group.places].tolist() == batch.tokens[group.targets].tolist()
        seen += group.targets.tolist()
    assert sorted(seen) == list(range(sum(lengths)))
