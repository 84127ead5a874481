"""Planted sharding faults: what is changed in a good plan, a good model or this package itself,
and which place must be named by what stops it.

`plan`: refused when the plan is applied. `error`: an operator, a boundary or a module raises.
`report`: `check_gradients` reports different values.
"""

from __future__ import annotations

from functools import partial

from dtensor_block import (
    INNER,
    PENDING,
    SUMMED,
    WHOLE,
    Tiny,
    cut,
    with_boundary,
)
from fault import (
    AVERAGED,
    LARGEST,
    Fault,
    both,
    changed,
    opaque,
    output_bias,
    parameter,
    same,
    without_boundary,
)
from faulty_modules import (
    AddsToPending,
    Detached,
    Detour,
    Gathers,
    HardCoded,
    KeepsOld,
    LocalSum,
    LosesLayout,
    Mixes,
    NonLinear,
    OwnFunction,
    OwnLabels,
    OwnMean,
    OwnScale,
    Redistributes,
    Twice,
    TwoSums,
    Unlabelled,
    layer,
    with_layer,
)
from lint_faults import LINT_FAULTS
from module_faults import MODULE_FAULTS
from planted_faults import (
    double_settlement,
    forgotten_adjoint,
    no_reduction_in_production,
    no_settlement,
    stale_key,
    swapped_parameters,
    swapped_ranks,
    unmasked_rows,
    wrong_order_of_cut,
    wrong_reduction,
    wrong_rows,
)
from torch.distributed.tensor import Partial

from hp_dtensor.placements import SectionedShard, StridedShard
from hp_dtensor.plan import (
    Contract,
    LocalAttribute,
)

ATTENTION, MLP = "layers.0.attention", "layers.0.mlp"

FAULTS: dict[str, Fault] = {
    "weight cut along the wrong dim": Fault(
        parameter(f"{ATTENTION}.o.weight", cut(0)), "in module layers.0.attention.o", "error"
    ),
    "one of q, k, v left whole": Fault(
        both(
            parameter(f"{ATTENTION}.k.weight", WHOLE),
            parameter(f"{ATTENTION}.k.bias", WHOLE),
        ),
        "in module layers.0.attention",
        "error",
    ),
    "bias not cut with its weight": Fault(
        parameter(f"{ATTENTION}.q.bias", WHOLE), "in module layers.0.attention.q", "error"
    ),
    "bias added once per rank": Fault(
        output_bias,
        "in module layers.0.attention.o",
        "error",
        partial(Tiny, bias=True),
    ),
    "reduction missing on exit": Fault(
        changed(ATTENTION, "outputs", "0", inside=cut(1)),
        r"boundary layers.0.attention, output '0': expected tp: S\(1\), found tp: P\(sum\)",
    ),
    "reduction missing between neighbours": Fault(
        changed(ATTENTION, "outputs", "0", outside=PENDING), "in module layers.0", "error"
    ),
    "reduction missing after the embedding": Fault(
        changed("embed", "outputs", "", inside=WHOLE),
        r"boundary embed, output '': expected R, found tp: P\(sum\)",
    ),
    "reduction twice": Fault(
        parameter("embed.weight", WHOLE),
        r"boundary embed, output '': expected tp: P\(sum\), found R",
    ),
    "reduction with another operation": Fault(
        changed(ATTENTION, "outputs", "0", inside=AVERAGED),
        r"output '0': expected tp: P\(avg\), found tp: P\(sum\)",
    ),
    "head's output taken for another dim": Fault(
        changed("head", "outputs", "", inside=cut(1)), r"boundary head, output '': expected"
    ),
    "sum of gradients missing on entry": Fault(
        changed(ATTENTION, "inputs", "x", inside=WHOLE),
        "in module layers.0.attention.q",
        "error",
    ),
    "sum of gradients missing at the head": Fault(
        both(
            changed("head", "inputs", "input", inside=WHOLE, outside=WHOLE),
            changed("norm", "outputs", "", outside=WHOLE),
        ),
        "in module head",
        "error",
    ),
    "parameter's gradient not declared a summand": Fault(
        parameter(f"{ATTENTION}.q_norm.weight", WHOLE),
        "in module layers.0.attention.q_norm",
        "error",
    ),
    "parameter's gradient declared a summand and is none": Fault(
        parameter("layers.0.first.weight", SUMMED),
        "layers.0.first",
        "error",
        sequence_parallel=False,
    ),
    "neighbours disagree": Fault(
        changed("norm", "inputs", "x", outside=WHOLE),
        r"boundary norm, input 'x': expected R, found tp: S\(1\).*made by boundary layers.1, "
        r"which declares tp: S\(1\) outside",
    ),
    "inputs swapped": Fault(
        changed(MLP, "inputs", "x", outside=SUMMED, inside=cut(1)),
        r"boundary layers.0.mlp, input 'x': expected tp: R \(gradient P\(sum\)\), "
        r"found tp: S\(1\).*made by boundary layers.0.second",
    ),
    "layout lost on exit": Fault(
        lambda plan: plan,
        "boundary layers.0.first, output '': a plain tensor .* lost its layout",
        model=partial(with_layer, LosesLayout, "first"),
    ),
    "layout lost on the way": Fault(
        lambda plan: plan,
        "boundary layers.0.mlp, input 'x': a plain tensor .* lost its layout",
        model=partial(with_layer, Detour, ""),
    ),
    "size not localized": Fault(
        lambda plan: with_boundary(plan, ATTENTION, localize=[]),
        "in module layers.0.attention",
        "error",
    ),
    "another size localized": Fault(
        lambda plan: with_boundary(plan, ATTENTION, localize=[LocalAttribute("heads", "tp", 2)]),
        "boundary layers.0.attention: attribute 'heads' is 4",
        "plan",
    ),
    # Inside an opaque region the plan is trusted; only values show the fault.
    "opaque: sections cut as one": Fault(
        parameter(f"{MLP}.gate_up", cut(0)), "output of boundary layers.0.mlp", "report"
    ),
    "opaque: sections of other lengths": Fault(
        parameter(f"{MLP}.gate_up", Contract({"tp": SectionedShard(0, (INNER + 4, INNER - 4))})),
        "output of boundary layers.0.mlp",
        "report",
    ),
    "opaque: reduction twice": Fault(
        both(parameter(f"{MLP}.gate_up", WHOLE), parameter(f"{MLP}.down", WHOLE)),
        "output of boundary layers.0.mlp",
        "report",
    ),
    "opaque: reduction with another operation": Fault(
        changed(MLP, "outputs", "", inside=AVERAGED), "output of boundary layers.0.mlp", "report"
    ),
    "opaque: sum of gradients missing on entry": Fault(
        changed(MLP, "inputs", "x", inside=WHOLE),
        "gradient of the output of boundary layers.0.second",
        "report",
    ),
    "opaque: parameter's gradient not summed": Fault(
        both(opaque(ATTENTION), parameter(f"{ATTENTION}.q_norm.weight", WHOLE)),
        "gradient of layers.0.attention.q_norm.weight",
        "report",
    ),
    "opaque: parameter's gradient summed twice": Fault(
        both(opaque("layers.0.first"), parameter("layers.0.first.weight", SUMMED)),
        "gradient of layers.0.first.weight",
        "report",
        sequence_parallel=False,
    ),
    "opaque: bias added once per rank": Fault(
        both(output_bias, opaque(ATTENTION), opaque("layers.1.attention")),
        "output of boundary layers.0.attention",
        "report",
        partial(Tiny, bias=True),
    ),
    # Parameters.
    "query cut along the wrong dim": Fault(
        parameter(f"{ATTENTION}.q.weight", cut(1)), "in module layers.0.attention.q"
    ),
    "output projection left whole": Fault(
        parameter(f"{ATTENTION}.o.weight", WHOLE), "in module layers.0.attention.o"
    ),
    "query left whole": Fault(
        both(parameter(f"{ATTENTION}.q.weight", WHOLE), parameter(f"{ATTENTION}.q.bias", WHOLE)),
        "in module layers.0.attention",
    ),
    "wrong rank order of the query's heads": Fault(
        both(
            parameter(f"{ATTENTION}.q.weight", Contract({"tp": StridedShard(0, 2)})),
            parameter(f"{ATTENTION}.q.bias", Contract({"tp": StridedShard(0, 2)})),
        ),
        "in module layers.0.attention",
    ),
    "wrong rank order of the output projection": Fault(
        parameter(f"{ATTENTION}.o.weight", Contract({"tp": StridedShard(1, 2)})),
        "in module layers.0.attention.o",
    ),
    "sections in a weight that has none": Fault(
        both(
            parameter(f"{ATTENTION}.v.weight", Contract({"tp": SectionedShard(0, (4, 4))})),
            parameter(f"{ATTENTION}.v.bias", Contract({"tp": SectionedShard(0, (4, 4))})),
        ),
        "in module layers.0.attention",
    ),
    "bias cut in another order than its weight": Fault(
        parameter(f"{ATTENTION}.k.bias", Contract({"tp": StridedShard(0, 2)})),
        "in module layers.0.attention.k",
    ),
    "head norm cut": Fault(
        parameter(f"{ATTENTION}.q_norm.weight", cut(0)), "in module layers.0.attention.q_norm"
    ),
    "norm cut": Fault(parameter("layers.0.first.weight", cut(0)), "in module layers.0.first"),
    "embedding cut along its features": Fault(
        parameter("embed.weight", cut(1)), r"boundary embed, output ''"
    ),
    "head cut along its features": Fault(parameter("head.weight", cut(1)), "in module head"),
    "head left whole": Fault(
        parameter("head.weight", WHOLE), r"boundary head, output ''|module head"
    ),
    "norm's gradient not declared a summand": Fault(
        parameter("layers.0.second.weight", WHOLE), "in module layers.0.second"
    ),
    "norm's gradient declared an average": Fault(
        parameter("layers.0.second.weight", Contract({}, {"tp": Partial("avg")})),
        "layers.0.second",
    ),
    "last norm's gradient declared a summand and is none": Fault(
        parameter("norm.weight", SUMMED), "norm", sequence_parallel=False
    ),
    # Boundaries.
    "swapped contract at the attention's entry": Fault(
        changed(ATTENTION, "inputs", "x", outside=SUMMED, inside=cut(1)),
        "boundary layers.0.attention, input 'x'",
    ),
    "swapped contract at the embedding's exit": Fault(
        changed("embed", "outputs", "", outside=PENDING, inside=WHOLE), "boundary embed, output ''"
    ),
    "swapped contract of the head": Fault(
        changed("head", "outputs", "", outside=cut(-1), inside=WHOLE), "boundary head, output ''"
    ),
    "swapped contract of a layer": Fault(
        changed("layers.0", "inputs", "x", outside=cut(1), inside=WHOLE),
        "boundary layers.0, input 'x'",
    ),
    "gather missing on entry": Fault(
        changed(ATTENTION, "inputs", "x", inside=cut(1)), "in module layers.0.attention"
    ),
    "slice missing at the first layer": Fault(
        changed("layers.0", "inputs", "x", inside=WHOLE), "boundary layers.0.first, input 'x'"
    ),
    "slice twice": Fault(
        changed("embed", "outputs", "", outside=cut(1)), "boundary layers.0, input 'x'"
    ),
    "reduction with the maximum": Fault(
        changed(ATTENTION, "outputs", "0", inside=LARGEST),
        "boundary layers.0.attention, output '0'",
    ),
    "entry cut along the features": Fault(
        changed(ATTENTION, "inputs", "x", outside=cut(2)), "boundary layers.0.attention, input 'x'"
    ),
    "exit scattered along another dim": Fault(
        changed(ATTENTION, "outputs", "0", outside=cut(2)), "in module layers.0"
    ),
    "exit left whole in a stream that is cut": Fault(
        changed(ATTENTION, "outputs", "0", outside=WHOLE), "in module layers.0"
    ),
    "norm's output cut along another dim": Fault(
        changed("layers.0.first", "outputs", "", outside=cut(2)),
        "boundary layers.0.attention, input 'x'",
    ),
    "boundary of the embedding missing": Fault(
        without_boundary("embed"), "boundary layers.0, input 'x': expected R, found tp: P"
    ),
    "boundary of the attention missing": Fault(
        without_boundary(ATTENTION), "in module layers.0.attention"
    ),
    "boundary of the head missing": Fault(
        without_boundary("head"), "in module head|in module \\(root\\)"
    ),
    "labels that lost their layout": Fault(
        without_boundary(""),
        r"cross_entropy: a plain tensor.*in module \(root\)",
        model=OwnLabels,
    ),
    "boundary of a norm missing": Fault(
        both(
            without_boundary("layers.1.second"),
            changed("layers.1.mlp", "inputs", "x", outside=WHOLE),
        ),
        "boundary layers.1.mlp, input 'x'",
    ),
    "gradient not whole at the head": Fault(
        changed("norm", "outputs", "", outside=WHOLE), "boundary head, input 'input'"
    ),
    "optional argument declared present": Fault(
        changed("", "inputs", "labels", optional=False),
        "boundary \\(root\\), input 'labels'",
        model=partial(Unlabelled),
    ),
    # Modules.
    "whole tensor where a part is declared": Fault(
        same, "boundary layers.0.first, output ''", model=layer(Gathers, "first")
    ),
    "module redistributes by itself": Fault(
        same, "boundary layers.0.second, output ''", model=layer(Redistributes, "second")
    ),
    "autograd.Function outside a region": Fault(
        same, "in module layers.0.first", model=layer(OwnFunction, "first")
    ),
    "mean over a dim that is cut": Fault(
        same, "in module layers.0.first", model=layer(LocalSum, "first")
    ),
    "number of heads hard-coded": Fault(
        same, "in module layers.0.attention", model=layer(HardCoded, "attention")
    ),
    "constant added to a summand": Fault(
        same, "in module layers.0.attention", model=layer(AddsToPending, "attention")
    ),
    "nonlinear function of a summand": Fault(
        same, "in module layers.0.attention", model=layer(NonLinear, "attention")
    ),
    "plain tensor beside parts": Fault(same, "in module layers.0", model=layer(Mixes)),
    "whole tensor beside parts": Fault(same, "in module layers.0", model=layer(KeepsOld)),
    # Inside opaque regions.
    "opaque: scales by its own largest feature": Fault(
        same, "output of boundary layers.0.mlp", "report", layer(OwnScale, "mlp")
    ),
    "opaque: cuts its output off": Fault(
        same,
        "gradient of the output of boundary layers.0|gradient of layers.0.mlp",
        "report",
        layer(Detached, "mlp"),
    ),
    "opaque: counts its output twice": Fault(
        same, "output of boundary layers.0.mlp", "report", layer(Twice, "mlp")
    ),
    "opaque: mean over its own part": Fault(
        opaque("layers.0.first"),
        "output of boundary layers.0.first",
        "report",
        layer(OwnMean, "first"),
    ),
    "opaque: sections in another order": Fault(
        parameter(f"{MLP}.down", Contract({"tp": StridedShard(1, 2)})),
        "output of boundary layers.0.mlp",
        "report",
    ),
    "opaque: down cut along the wrong dim": Fault(
        parameter(f"{MLP}.down", cut(0)), "in module layers.0.mlp"
    ),
    "opaque: gather missing on entry": Fault(
        changed(MLP, "inputs", "x", inside=cut(1)), "layers.0.mlp|layers.0"
    ),
    "opaque: reduction missing on exit": Fault(
        changed(MLP, "outputs", "", inside=WHOLE), "output of boundary layers.0.mlp", "report"
    ),
    "opaque: wrong rank order of the queries": Fault(
        both(
            opaque(ATTENTION),
            parameter(f"{ATTENTION}.q.weight", Contract({"tp": StridedShard(0, 2)})),
            parameter(f"{ATTENTION}.q.bias", Contract({"tp": StridedShard(0, 2)})),
        ),
        "output of boundary layers.0.attention",
        "report",
    ),
    "opaque: output is not like the input it names": Fault(
        changed(MLP, "outputs", "", inside=cut(-1), like="x"),
        "boundary layers.0.mlp, output '': declared to be like input 'x'",
    ),
    "opaque: head norm's gradient averaged": Fault(
        both(
            opaque(ATTENTION),
            parameter(f"{ATTENTION}.q_norm.weight", Contract({}, {"tp": Partial("avg")})),
        ),
        "gradient of layers.0.attention.q_norm.weight",
        "report",
    ),
    **LINT_FAULTS,
    **MODULE_FAULTS,
    # In this package: values, ranks, sums and keys.
    "planted: reductions take the average": Fault(same, "embed", "report", plant=wrong_reduction),
    "planted: gradients take the way of values": Fault(
        same, "gradient of the output of boundary", "report", plant=forgotten_adjoint
    ),
    "planted: gathered pieces in the wrong order": Fault(
        same, "output of boundary", "report", plant=swapped_ranks
    ),
    "planted: production keeps another rank's part": Fault(
        same, "output of boundary embed", "report", plant=swapped_parameters
    ),
    "planted: gradients not settled": Fault(
        same, "gradient of layers.0.first.weight", "report", plant=no_settlement
    ),
    "planted: gradients settled twice": Fault(
        same, "gradient of layers.0.first.weight", "report", plant=double_settlement
    ),
    "planted: stale cache key": Fault(
        same, "in module|boundary", "any", layer(TwoSums, "second"), plant=stale_key
    ),
    "planted: production looks up other rows": Fault(
        same, "output of boundary embed", "report", plant=wrong_rows
    ),
    "planted: rows of other ranks are not cleared": Fault(
        same, "output of boundary embed", "report", plant=unmasked_rows
    ),
    "planted: production forgets a reduction": Fault(
        same, "in module layers.0", "error", plant=no_reduction_in_production
    ),
    "planted: shards from the wrong coordinate": Fault(
        same, "output of boundary layers.0.mlp", "report", plant=wrong_order_of_cut
    ),
}
