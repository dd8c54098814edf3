"""Layouts at their bounds: numbers of outputs, and when rows of several sequences are padded."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv import Window, make_batch
from jaxkv.core.constants import NO_SLOT
from jaxkv.planning.layout import count_rows, lay_out_batch
from tests.helpers.caches import WIDE, Kind, recurrent_cache
from tests.helpers.meshes import RULES, mesh_of

pytestmark = pytest.mark.core

ROWS = Kind("rows", cells=64, sequences=5, streams=5)


@pytest.mark.parametrize("count", [8, 9, 17])
def test_init_batch_traced_tokens_have_an_output_for_each_sequence(count):
    @jax.jit
    def outputs(cache, tokens):
        ids = np.arange(count)
        return jaxkv.init_batch(cache, make_batch(tokens, sequences=ids)).ubatch.output_index

    found = outputs(WIDE.make(), jnp.arange(count)).tolist()
    assert sorted(found)[:count] == [*range(count)]
    assert len(found) == count  # a power of two, but at most the number of tokens


@pytest.mark.parametrize("count, size", [(8, 8), (9, 16), (16, 16), (17, 32)])
def test_outputs_are_padded_to_a_power_of_two(count, size):
    cache = WIDE.make()
    batch = make_batch([1] * 32, sequences=np.arange(32) % 16, outputs=np.arange(32) < count)
    assert lay_out_batch(cache.table.spec, batch, 512, None)[2] == size
    assert jaxkv.init_full(cache, outputs=count).ubatch.outputs.shape == (size,)


@pytest.mark.parametrize("indices", [[1, 5, 9, 13, 17, 21, 25, 29], [1, 2]])
def test_outputs_of_a_plan_are_those_of_the_batch(indices):
    flags = np.isin(np.arange(32), indices)
    batch = make_batch([1] * 32, sequences=np.arange(32) % 16, outputs=flags)
    ubatch, count = jaxkv.init_batch(WIDE.make(), batch).ubatch, len(indices)
    assert ubatch.outputs.tolist() == indices + [31] * (8 - count)
    assert ubatch.output_index[:count].tolist() == indices
    assert (ubatch.output_index[count:] >= 32).all()


def test_padding_of_a_traced_batch_is_no_output():
    @jax.jit
    def order(cache, valid):
        batch = make_batch([1] * 4, valid=valid, outputs=[True] * 4)
        return jaxkv.init_batch(cache, batch).ubatch.output_index

    assert order(WIDE.make(), jnp.arange(4) != 2).tolist() == [0, 1, NO_SLOT, 3]


@pytest.mark.parametrize("ubatch_size, tokens", [(4, 1), (10, 2), (14, 2)])
def test_init_full_has_as_many_tokens_in_a_row_as_fit(ubatch_size, tokens):
    ubatch = jaxkv.init_full(ROWS.make(), ubatch_size=ubatch_size).ubatch
    assert ubatch.tokens.shape == (5, tokens)


def shapes(lengths, ubatch_size, split_by=None, kind=ROWS):
    batch = make_batch([[1] * length for length in lengths])
    _, parts, _ = lay_out_batch(kind.make().table.spec, batch, ubatch_size, split_by)
    return [part.shape for part in parts]


def test_rows_are_padded_up_to_a_number_of_tokens():
    """64 tokens, the tokens of a ubatch, or a quarter more than without padding."""
    assert shapes([9, 1, 1, 1], 13) == [(4, 13)]
    assert len(shapes([9, 1, 1, 1, 1], 13)) > 1  # 65 tokens with padding
    assert shapes([48, 40, 40], 256) == [(4, 64)]
    assert len(shapes([48, 40, 40], 160)) > 1
    assert shapes([64, 64, 64, 32], 256) == [(4, 64)]  # else 128 tokens, then 96


def test_rows_are_not_padded_if_a_part_evicts_cells():
    window = Kind("hybrid", cells=64, sequences=5, streams=5, windows=(None, Window.sliding(3)))
    assert len(shapes([9, 1, 1, 1], 13, kind=window)) > 1


@pytest.mark.parametrize("kind", [ROWS, WIDE], ids=str)
def test_lay_out_batch_cuts_by_split_by(kind):
    assert shapes([3, 2], 8, "sequence", kind) == [(1, 4), (1, 2)]
    assert shapes([3, 2], 8, "equal", kind) == [(2, 2), (1, 1)]
    assert shapes([3, 2], 8, "simple", WIDE) == [(1, 8)]


@pytest.mark.parametrize("rows, tokens, count", [(1, 1, 4), (2, 2, 4), (1, 2, 1)])
def test_rows_of_states_on_a_mesh_are_all_sequences_if_no_device_computes_more(rows, tokens, count):
    cache = recurrent_cache(1, {"x": ((), jnp.float32)}, sequences=4, streams=4, max_rollback=0)
    table = cache.table.with_sharding_rules(RULES)
    with jax.set_mesh(mesh_of(data=2)):
        assert count_rows(table, rows, tokens) == count


def test_row_of_padding_is_of_a_sequence_of_the_cache():
    ubatch = jaxkv.init_batch(ROWS.make(), make_batch([[1], [2], [3]])).ubatch
    assert ubatch.row_sequence.tolist() == ubatch.row_stream.tolist() == [0, 1, 2, 0]
