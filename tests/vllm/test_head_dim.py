"""A number of heads that is divided into the hidden size."""

import copy
import json
import pickle

import pytest

from tp3.vllm.head_dim import HeadCount, head_count


def test_the_docstring():
    assert 4096 // HeadCount(33, hidden=4096, head_dim=128) == 128


@pytest.mark.parametrize(
    "made", [lambda x: x, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))]
)
def test_it_is_a_number_and_stays_itself(made):
    heads = made(HeadCount(33, hidden=4096, head_dim=128))
    assert (heads, heads // 3, heads % 3, heads * 128) == (33, 11, 0, 4224)
    assert (4096 // heads, 4096 % heads, 4096 / heads) == (128, 0, 128.0)
    assert (4224 // heads, 4225 % heads, 66 / heads) == (128, 1, 2.0)
    assert json.dumps({"num_attention_heads": heads}) == '{"num_attention_heads": 33}'


def test_a_plain_number_where_division_is_right():
    assert type(head_count(32, hidden=4096, head_dim=128)) is int
    assert type(head_count(33, hidden=4096, head_dim=128)) is HeadCount
