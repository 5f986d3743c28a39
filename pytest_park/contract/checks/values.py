"""C1 to C4: values and layout come back."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

from ..case import Case
from ..host import HostLedger
from ..odd_weights import DTYPES, ONE_ELEMENT, SHAPES, VIEWS
from ..probes import plain
from ..registry import promise
from ..snapshot import tensors_of
from ..traits import SHARING
from ..verdict import Broken, bytes_text

AS_IT_IS = {"the module as it is": None}


@promise(
    1,
    "after park and restore every tensor has the same bits, dtype, device, shape, stride and offset",
    cause="""the copy is made with an operation that changes the layout or the dtype (contiguous(), clone() without
        preserve_format, to(dtype)), or it is a view of the weight and not a copy, so that the placeholder
        overwrites it""",
    reports=("fzyzcjy/torch_memory_saver/issues/71", "sgl-project/sglang/pull/32420", "sgl-project/sglang/pull/35813"),
    variants=AS_IT_IS | DTYPES | SHAPES | VIEWS,
)
def check_every_tensor_comes_back_as_it_was(case: Case, kind: object) -> None:
    case.cycle()
    case.expect_same("values", "dtype", "device", "layout")


@promise(
    1,
    "the forward gives the same bits after park and restore as before",
    cause="a weight, or something computed from one and cached, came back changed or on another device",
    reports=("fzyzcjy/torch_memory_saver/issues/71", "huggingface/transformers/issues/47169"),
)
def check_the_output_is_the_same_to_the_bit(case: Case) -> None:
    case.cycle()
    case.expect_output()


@promise(
    1,
    "a forward that torch.compile has compiled is not compiled anew after park and restore",
    cause="after each restore the class, the shape or the strides of a weight are others, which torch.compile guards",
    reports=("pytorch/pytorch/issues/150711", "Comfy-Org/ComfyUI/issues/10666"),
    in_child="if possible",
)
def check_a_compiled_forward_is_not_compiled_anew(case: Case) -> None:
    graphs = []

    def backend(graph: torch.fx.GraphModule, example_inputs: object) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    probe = plain(case.device.device, width=16, layers=1)
    parkable = case.adopt(probe.module, probe.inputs)
    torch._dynamo.reset()  # what is compiled counts by code, and that of a layer is shared by all of its class
    compiled = torch.compile(parkable.call, backend=backend)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        compiled()
        compiled()
        before = len(graphs)
        for _ in range(2):
            case.scarce(times=2)
            case.attempt("park", parkable.park)
            case.device.relieve()
            case.attempt("restore", parkable.restore)
            case.history.append("the compiled forward")
            compiled()
    if len(graphs) > before:
        raise Broken(
            expected=f"{before} graphs after two cycles, as before",
            seen=f"{len(graphs)}: it was compiled anew after park and restore",
        )


@promise(
    2,
    "a weight that has the shape of a placeholder is a weight like any other",
    cause="parked weights are told from resident ones by the shape of the placeholder, and not by a record",
    reports=("sgl-project/sglang/issues/38166",),
    variants=ONE_ELEMENT,
)
def check_a_weight_of_one_element_is_not_taken_for_a_placeholder(case: Case, position: object) -> None:
    for number in ("one cycle", "two cycles"):
        case.park(must_free=False)
        case.restore()
        case.expect_same(after=number)
    case.expect_output(after="two cycles")


@promise(
    3,
    "no storage grows through a cycle, on the device or on the host",
    cause="views are copied by their elements: an expanded view is materialised, a shared storage is copied once per "
    "view",
    reports=("sgl-project/sglang/pull/22594",),
    variants=AS_IT_IS | VIEWS,
)
def check_no_storage_grows(case: Case, kind: object) -> None:
    before = case.device.bytes
    host = HostLedger()
    at_first = host.bytes()
    case.park()
    copies = host.bytes() - at_first
    most = sum({r.storage: r.storage_bytes for r in case.before.records.values()}.values())
    if copies > most:
        raise Broken(
            expected=f"host copies of at most {bytes_text(most)}, which is what weights and buffers have under them",
            seen=f"host copies of {bytes_text(copies)}",
            names=case.weights(),
        )
    case.restore()
    case.cycle()
    case.expect_same("storage", after="two cycles")
    placeholders = sum(dtype.itemsize for dtype in {weight.dtype for weight in case.weights().values()})
    what = "what there was before the first park, and one element of each dtype for placeholders"
    case.expect_bytes(at_most=before + placeholders, what=what)


@promise(
    4,
    "tensors that shared a storage share it after park and restore, buffers included",
    cause="each parameter is copied by itself, so that ties and views come back as separate tensors",
    reports=(
        "huggingface/accelerate/issues/993",
        "huggingface/accelerate/pull/2330",
        "huggingface/accelerate/pull/4083",
    ),
    variants=SHARING,
)
def check_what_shared_a_storage_still_shares_it(case: Case, kind: object) -> None:
    case.cycle()
    case.expect_same("sharing")
    tensors = dict(tensors_of(case.module))
    records = case.before.records
    for first, *others in case.before.groups():
        same = [name for name in others if (records[name].offset, records[name].shape) == _place(case, first)]
        if not same or not tensors[first].is_floating_point():
            continue
        with torch.no_grad():
            tensors[first].add_(1)
        for name in same:
            if not torch.equal(tensors[first].cpu(), tensors[name].cpu()):
                raise Broken(
                    expected=f"a write to {first} is seen in {name}, as before", seen="it is not", names=[first, name]
                )


def _place(case: Case, name: str) -> tuple[int, tuple[int, ...]]:
    record = case.before.records[name]
    return record.offset, record.shape
