"""The wire format: what the public client writes is read, what is written it reads, and nonsense is a clear refusal."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from megatron_retool.target_sequences import RequestRefused
from megatron_retool.tinker import wire
from megatron_retool.tinker.messages import MESSAGES
from megatron_retool.tinker.sampler import LikeliestTokens, SampledTokens, SampleResult
from sglang_rollout.gateway.errors import ApiError

tinker = pytest.importorskip("tinker", reason="the client of Tinker is not installed (pyproject.toml, extra test)")
from tinker import types  # noqa: E402
from tinker.proto import request_conv, response_conv  # noqa: E402

TENSORS = st.one_of(
    arrays.arrays(np.float32, arrays.array_shapes(min_dims=1, max_dims=2, min_side=1, max_side=5)),
    arrays.arrays(np.int64, arrays.array_shapes(min_dims=1, max_dims=2, min_side=1, max_side=5)),
)


def sent(data, loss_fn="ppo", config=None, seq_id=3, forward_only=False) -> bytes:
    request = types.ForwardBackwardRequest(
        forward_backward_input=types.ForwardBackwardInput(data=data, loss_fn=loss_fn, loss_fn_config=config),
        model_id="run",
        seq_id=seq_id,
    )
    message = request_conv.forward_backward_request_to_proto(request)
    message.forward_only = forward_only
    return message.SerializeToString()


def datum(tokens, **inputs):
    return types.Datum(model_input=types.ModelInput.from_ints(tokens), loss_fn_inputs=inputs)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=9), st.dictionaries(st.sampled_from("abc"), TENSORS))
def test_a_request_of_the_client_is_read_as_it_was_written(tokens, inputs):
    given = {name: types.TensorData.from_numpy(each) for name, each in inputs.items()}
    read = wire.read_forward_backward(sent([datum(tokens, **given)], config={"beta": 0.5, "mode": "x"}))
    (found,) = wire.read_data(read)
    assert (read.model_id, read.seq_id, read.loss_fn, read.forward_only) == ("run", 3, "ppo", False)
    assert read.loss_fn_config == {"beta": 0.5, "mode": "x"}
    assert found.tokens.tolist() == tokens
    assert found.inputs.keys() == inputs.keys()
    for name, each in inputs.items():
        np.testing.assert_array_equal(found.inputs[name], each)
        assert found.inputs[name].dtype == each.dtype


def test_forward_only_and_chunks_of_text():
    parts = types.ModelInput(chunks=[types.EncodedTextChunk(tokens=[1, 2]), types.EncodedTextChunk(tokens=[3])])
    read = wire.read_forward_backward(sent([types.Datum(model_input=parts, loss_fn_inputs={})], forward_only=True))
    assert read.forward_only
    assert wire.read_data(read)[0].tokens.tolist() == [1, 2, 3]


def test_a_sparse_tensor_becomes_a_matrix():
    dense = np.array([[0, 7, 0], [0, 0, 0], [5, 0, 6]], np.int64)
    tensor = MESSAGES["Tensor"](dtype=wire.INT64, shape=dense.shape)
    tensor.sparse_rows.values = np.array([7, 5, 6], np.int64).tobytes()
    tensor.sparse_rows.row_starts = np.array([0, 1, 1, 3], np.int64).tobytes()
    tensor.sparse_rows.columns = np.array([1, 0, 2], np.int64).tobytes()
    np.testing.assert_array_equal(wire.read_tensor(tensor, "x"), dense)
    tensor.sparse_rows.columns = np.array([1, 0, 3], np.int64).tobytes()
    with pytest.raises(RequestRefused, match="x: a column lies outside its 3"):
        wire.read_tensor(tensor, "x")
    tensor.sparse_rows.row_starts = np.array([0, 2, 1, 3], np.int64).tobytes()
    with pytest.raises(RequestRefused, match="x: 3 values, 3 columns and 4 row starts are not those"):
        wire.read_tensor(tensor, "x")


def test_bfloat16_and_int32_are_widened():
    for dtype, written, expected in (
        (wire.BFLOAT16, np.array([0x3F80, 0xC040], np.uint16), np.array([1.0, -3.0], np.float32)),
        (wire.INT32, np.array([4, -5], np.int32), np.array([4, -5], np.int64)),
    ):
        found = wire.read_tensor(MESSAGES["Tensor"](dtype=dtype, shape=[2], dense=written.tobytes()), "x")
        np.testing.assert_array_equal(found, expected)
        assert found.dtype == expected.dtype


def test_a_few_bytes_that_claim_a_huge_tensor_take_no_memory():
    request = MESSAGES["ForwardBackwardRequest"](model_id="run", seq_id=1, loss_fn="ppo")
    added = request.data.add()
    added.model_input.add().text.tokens = np.zeros(1, np.int32).tobytes()
    tensor = added.loss_fn_inputs["a"]
    tensor.dtype = wire.FLOAT32
    tensor.shape.extend([1 << 40, 1 << 40])
    tensor.sparse_rows.row_starts = np.zeros(1, np.int64).tobytes()
    with pytest.raises(RequestRefused, match=r"data\[0\].loss_fn_inputs\['a'\]: with it .* more than 67108864 numbers"):
        wire.read_data(wire.read_forward_backward(request.SerializeToString()))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.ClearField("model_input"), r"data\[0\].model_input: it has no tokens"),
        (
            lambda d: d.model_input.add().image.MergeFrom(MESSAGES["Image"](data=b"x")),
            r"chunks\[1\]: the model reads only text",
        ),
        (lambda d: setattr(d.model_input[0].text, "tokens", b"abc"), "3 bytes are no whole number of 4-byte numbers"),
        (lambda d: setattr(d.loss_fn_inputs["a"], "dtype", 9), "dtype 9 is none of"),
        (lambda d: d.loss_fn_inputs["a"].shape.append(7), r"shape \[2, 7\] does not hold 2 numbers"),
        (lambda d: d.loss_fn_inputs["a"].shape.append(-1), r"shape \[2, -1\] has a negative size"),
    ],
)
def test_what_is_wrong_with_a_datum_is_named(change, message):
    request = MESSAGES["ForwardBackwardRequest"](model_id="run", seq_id=1, loss_fn="ppo")
    added = request.data.add()
    added.model_input.add().text.tokens = np.arange(2, dtype=np.int32).tobytes()
    added.loss_fn_inputs["a"].CopyFrom(wire.tensor_message(np.ones(2, np.float32)))
    change(added)
    with pytest.raises(RequestRefused, match=message):
        wire.read_data(wire.read_forward_backward(request.SerializeToString()))


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200), st.integers(0, 60), st.binary(min_size=1, max_size=4))
def test_any_bytes_are_read_or_refused(noise, place, cut):
    """Neither noise nor a good message with other bytes in it ends in any other error."""
    good = sent([datum([1, 2, 3], weights=types.TensorData.from_numpy(np.ones(3, np.float32)))])
    for body in (noise, good[:place] + cut + good[place + len(cut) :], good[:place]):
        try:
            wire.read_data(wire.read_forward_backward(body))
        except ApiError as error:
            assert error.status == 400
        except RequestRefused:
            pass


@settings(max_examples=50, deadline=None)
@given(
    st.lists(arrays.arrays(np.float32, arrays.array_shapes(min_dims=1, max_dims=2, max_side=4)), min_size=1, max_size=6)
)
def test_outputs_are_read_by_the_client_as_they_were(log_probs):
    body = wire.write_outputs({"logprobs": log_probs, "elementwise_loss": log_probs}, {"loss:sum": 1.5})
    found = response_conv.deserialize_forward_backward_output(body)
    assert found.metrics == {"loss:sum": 1.5}
    assert len(found.loss_fn_outputs) == len(log_probs)
    for datum_found, expected in zip(found.loss_fn_outputs, log_probs, strict=True):
        for name in ("logprobs", "elementwise_loss"):
            np.testing.assert_array_equal(datum_found[name].to_numpy(), expected)


def test_samples_are_read_by_the_client_as_they_were():
    top = LikeliestTokens(np.array([[1, 2], [3, 4]]), np.array([[-0.5, -1.0], [-2.0, -3.0]], np.float32))
    prompt = np.array([np.nan, -1.5], np.float32)
    targets = np.array([[-1.0, np.nan]], np.float32)
    result = SampleResult(
        [
            SampledTokens(np.array([5, 6]), np.array([-0.1, -0.2], np.float32), True, top),
            SampledTokens(np.array([7]), np.array([-0.3], np.float32), False),
        ],
        prompt,
        top,
        targets,
        cached_tokens=4,
    )
    found = response_conv.deserialize_sample_response(result.to_wire())
    assert [each.stop_reason for each in found.sequences] == ["stop", "length"]
    assert found.sequences[0].tokens_np.tolist() == [5, 6]
    np.testing.assert_array_equal(found.sequences[0].logprobs_np, [np.float32(-0.1), np.float32(-0.2)])
    np.testing.assert_array_equal(found.sequences[0].topk_logprobs_np.token_ids, top.ids)
    assert found.sequences[1].topk_logprobs_np is None
    np.testing.assert_array_equal(found.prompt_logprobs_np, prompt)
    np.testing.assert_array_equal(found.topk_prompt_logprobs_np.logprobs, top.log_probs)
    np.testing.assert_array_equal(found.target_prompt_logprobs.to_numpy(), targets)
    assert found.prompt_cache_hit_tokens == 4
