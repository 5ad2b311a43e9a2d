"""Puts sums on top of a pipeline of tf.data: how often it was asked, how long that took and what it handed out.

That takes six operations on data sets. Of such an operation that is run by itself TensorFlow keeps nothing: it is
placed and made into a kernel each time anew, which takes half a millisecond. Of a function it does so once for all of
them, and keeps that until somebody seeds the process or empties its caches. To optimize the function first, as is done
by default, takes four times as long as that and finds nothing, so it is switched off. It is written down rather than
traced, so that the first fit of a process has it too.
"""

from __future__ import annotations

import functools
import itertools
import os
from typing import Any

WAIT, BYTES = "wait/", "bytes/"
_numbers = itertools.count()


def new_sums(tf: Any) -> Any:
    """Sums that nothing was added to."""
    # Named, as they are found by their names; per process, as names outlive a fork.
    with tf.init_scope(), tf.device("/CPU:0"):
        return tf.raw_ops.StatsAggregatorHandle(shared_name=f"deep500_timing_{os.getpid()}_{next(_numbers)}")


def with_sums(tf: Any, variant: Any, sums: Any, tag: str, *, finalizes: bool) -> Any:
    """A pipeline that adds up what it hands out.

    Args:
        tf: TensorFlow.
        variant: The pipeline as tf.data's operations take it.
        sums: Where it adds up.
        tag: Tells it from others that add up at the same place.
        finalizes: Whether to do what making an iterator does first: to apply the options of the pipeline, by which it
            is optimized and prefetched.

    Returns:
        What an iterator can be made of; tf.data does not optimize it again.
    """
    from tensorflow.python.eager import context, execute

    called = f"deep500_timing_sums_on_top_{int(finalizes)}_{tag}"
    process: Any = context.context()
    if not process.has_function(called):
        process.add_function_def(_definition(tf, called, tag, finalizes))
    attributes = ("executor_type", "", "config_proto", _without_optimizing(tf))
    return execute.execute(called, 1, [variant, sums], attributes, process)[0]


def _definition(tf: Any, called: str, tag: str, finalizes: bool) -> Any:
    variant, resource = tf.variant.as_datatype_enum, tf.resource.as_datatype_enum
    function = tf.compat.v1.GraphDef().library.function.add()
    function.signature.name = called
    function.signature.is_stateful = True
    function.signature.input_arg.add(name="pipeline", type=variant)
    function.signature.input_arg.add(name="sums", type=resource)
    function.signature.output_arg.add(name="timed", type=variant)
    newest = "pipeline"

    def text(name: str, value: str) -> str:
        node = function.node_def.add(name=name, op="Const")
        node.attr["dtype"].type = tf.string.as_datatype_enum
        node.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(value))
        return f"{name}:output:0"

    def put(name: str, op: str, *inputs: str) -> Any:
        nonlocal newest
        node = function.node_def.add(name=name, op=op, input=[newest, *inputs])
        # The operations hand on what their input is of, whatever they are told that this be.
        node.attr["output_types"].list.type.append(variant)
        node.attr["output_shapes"].list.shape.add(unknown_rank=True)
        newest = f"{name}:handle:0"
        return node

    if finalizes:
        put("finalize", "FinalizeDataset")
    # Parts of the pipeline would add up what they do as well, such as how full a buffer is, and to read all of that
    # takes several times as long as the wait alone. So they get a place of their own, which nobody reads.
    unread = function.node_def.add(name="unread", op="StatsAggregatorHandle")
    unread.attr["shared_name"].s = b"deep500_timing_unread"
    nothing = text("nothing", "")
    put("below", "SetStatsAggregatorDataset", "unread:handle:0", nothing, nothing)
    put("wait", "LatencyStatsDataset", text("wait_tag", WAIT + tag))
    put("bytes", "BytesProducedStatsDataset", text("bytes_tag", BYTES + tag))
    put("on_top", "SetStatsAggregatorDataset", "sums", nothing, nothing)
    put("options", "OptionsDataset").attr["serialized_options"].s = _options(tf)
    function.ret["timed"] = newest
    return function


@functools.cache
def _without_optimizing(tf: Any) -> bytes:
    config = tf.compat.v1.ConfigProto()
    config.graph_options.rewrite_options.disable_meta_optimizer = True
    encoded: bytes = config.SerializeToString()
    return encoded


@functools.cache
def _options(tf: Any) -> bytes:
    # Else tf.data would prefetch above the sums, and they would be of a thread that nobody waits for.
    options = tf.data.Options()
    options.autotune.enabled = False
    options.experimental_optimization.apply_default_optimizations = False
    options.experimental_optimization.inject_prefetch = False
    encoded: bytes = options._to_proto().SerializeToString()
    return encoded
