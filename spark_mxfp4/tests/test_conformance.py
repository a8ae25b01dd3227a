"""The conformance check passes right kernels and reports typical mistakes of wrong kernels."""

import pytest
import torch

from own_kernels import swapped
from spark_mxfp4 import conformance, experts, registry
from spark_mxfp4.experts import ExpertWeights, moe
from spark_mxfp4.kernel import FunctionKernel, MoeKernel

CASES = {case.name: case for case in conformance.CASES}


OTHERS = conformance.OTHER_ACTIVATIONS


@pytest.mark.parametrize(
    ("name", "others"), [("torch", OTHERS), ("own_kernels:Padded", ()), ("own_kernels:LaidOut", ())]
)
def test_right_kernels_pass_every_case_also_with_padding_and_their_own_layout(name, others):
    results = conformance.check(registry.load(name))
    assert [result.case for result in results] == [*conformance.CASES, *others]
    assert all(result.difference < 0.006 for result in results)


def changed(weights, **parts):
    return weights._replace(down=weights.down._replace(**parts))


def one_row_unwritten(x, *rest):
    output = torch.empty_like(x)
    output[:-1] = moe(x, *rest)[:-1]
    return output


def inputs_changed(x, *rest):
    output = moe(x, *rest)
    x.zero_()
    return output


def fails(*_):
    raise RuntimeError("no kernel image")


MISTAKES = {
    "nibbles": ("a batch", lambda x, w, *rest: moe(x, ExpertWeights(*map(swapped, w)), *rest), "it differs by"),
    "scales": ("a batch", lambda x, w, *rest: moe(x, changed(w, scales=w.down.scales + 1), *rest), "it differs by"),
    "bias": ("a batch", lambda x, w, *rest: moe(x, changed(w, bias=None), *rest), "it differs by"),
    "clamp": ("a batch", lambda *a: moe(*a, experts.GPT_OSS._replace(limit=1e9)), "it differs by"),
    "shares": ("one token", lambda x, w, ids, s, m=None: moe(x, w, ids, s * 0 + 0.25, m), "it differs by"),
    "map": ("experts on another device", lambda x, w, ids, s, m=None: moe(x, w, ids.clamp(max=3), s), "it differs by"),
    "no tokens": ("no token", lambda x, w, ids, s, m=None: moe(x, w, ids, s, m)[0], "raised IndexError"),
    "unwritten": ("a batch", one_row_unwritten, "differs by nan"),
    "in place": ("a batch", inputs_changed, "it changed its inputs"),
    "dtype": ("a batch", lambda *a: moe(*a).float(), "returned torch.float32"),
    "failure": ("a batch", fails, "it raised RuntimeError: no kernel image"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_named(mistake):
    case, function, message = MISTAKES[mistake]
    result = conformance.run_case(FunctionKernel("wrong", function), CASES[case])
    assert message in result.problem
    with pytest.raises(ValueError, match=r"kernel 'wrong' must not serve · case '[\w ]+': "):
        conformance.check(FunctionKernel("wrong", function))


class Restoring(MoeKernel):
    def __init__(self, restored):
        super().__init__("restoring")
        self.restored = restored

    def prepare(self, weights):
        return changed(weights, scales=weights.down.scales.clone())

    def restore(self, prepared, *_sizes):
        return self.restored(prepared)

    def run(self, *arguments):
        return moe(*arguments)


def made_up_bias(value):
    return lambda w: changed(w, bias=w.down.weight.new_full(w.down.weight.shape[:2], value, dtype=torch.float32))


@pytest.mark.parametrize(
    ("case", "restored", "problem"),
    [
        ("a batch", lambda w: changed(w, scales=w.down.scales + 1), True),
        ("no bias", made_up_bias(0.0), False),
        ("no bias", made_up_bias(1.0), True),
    ],
)
def test_restore_must_give_the_bytes_back_but_may_add_a_zero_bias(case, restored, problem):
    result = conformance.run_case(Restoring(restored), CASES[case])
    assert ("restore does not return" in result.problem) is bool(result.problem) is problem


def test_only_experts_on_another_device_may_be_refused():
    def refused(*_):
        raise NotImplementedError("not here")

    kernel = FunctionKernel("refused", refused)
    result = conformance.run_case(kernel, CASES["experts on another device"])
    assert (result.problem, result.unsupported) == ("", "not here")
    assert "it raised NotImplementedError" in conformance.run_case(kernel, CASES["a batch"]).problem


def test_poison_ends_with_the_context():
    before = torch.are_deterministic_algorithms_enabled()  # other tests of this process may train
    with conformance.poisoned():
        assert torch.empty(3).isnan().all()
    assert torch.are_deterministic_algorithms_enabled() == before


@pytest.mark.parametrize(("name", "code", "line"), [("torch", 0, "it may serve"), ("nothing", 1, "")])
def test_exit_codes_of_the_program(capsys, name, code, line):
    assert conformance.main([name, "--device", "cpu"]) == code
    printed = capsys.readouterr()
    assert line in printed.out
    assert ("there is no kernel 'nothing'" in printed.err) is (code == 1)
