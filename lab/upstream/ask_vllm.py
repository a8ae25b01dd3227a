"""Ask the code of the vLLM that is first on the path. A program for an interpreter with torch; never imported.

Reads {"cases": [{"capability": [12, 1] | null, "flashinfer": true, "config": {…}, "selector": […]}, …],
"parser": MODULE, "profiles": {name: [argument, …]}} from stdin. The last line of stdout is
{"version": …, "source": folder, "selections": [{"backend", "error", "warnings"}, …], "profiles": {name: error or ""}};
a part that was not requested is empty, and a part that could not run is {"error": …}.

`cases` go to the MXFP4 selector, or to a `selector` as in families.toml. Cases without a capability must be first and
run on the CPU platform. For the others the CPU build's platform claims to be CUDA; only the platform, the capability
and the presence of FlashInfer and DeepGEMM are faked. `profiles` go to the parser of the API server.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

# gpt-oss-120b as vllm/model_executor/models/gpt_oss.py builds it.
GPT_OSS = {
    "num_experts": 128,
    "num_local_experts": 128,
    "num_logical_experts": 128,
    "experts_per_token": 4,
    "hidden_dim": 2880,
    "intermediate_size": 2880,
    "device": "cpu",
    "has_bias": True,
}


def parse(module: str, profiles: Mapping[str, list[str]]) -> dict[str, str]:
    """Give each profile's arguments to the parser of `module`; return the error of each, empty if accepted."""
    utilities = importlib.import_module("vllm.utils.argparse_utils")
    build = importlib.import_module(module).make_arg_parser
    errors = {}
    for name, arguments in profiles.items():
        stderr = io.StringIO()
        try:
            with contextlib.redirect_stderr(stderr):
                build(utilities.FlexibleArgumentParser()).parse_args(["--model", "/model", *arguments])
            errors[name] = ""
        except SystemExit:
            errors[name] = (stderr.getvalue().strip().splitlines() or ["it is refused without a message"])[-1]
        except Exception as error:  # noqa: BLE001 - any exception of a configuration class is a refusal
            errors[name] = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    return errors


def select(cases: list[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the experts backend that the selector chooses for each case."""
    import vllm.utils.deep_gemm  # noqa: PLC0415
    import vllm.utils.flashinfer  # noqa: PLC0415

    installed: set[str] = set()
    # Patch before importing the selector, which imports these functions by name.
    for probe in ("has_flashinfer", "has_flashinfer_cutlass_fused_moe"):
        setattr(vllm.utils.flashinfer, probe, lambda: "flashinfer" in installed)
    vllm.utils.deep_gemm.has_deep_gemm = lambda: "deep_gemm" in installed
    import torch  # noqa: PLC0415
    from vllm.model_executor.layers.fused_moe import config as moe  # noqa: PLC0415
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation  # noqa: PLC0415
    from vllm.model_executor.layers.fused_moe.oracle import mxfp4  # noqa: PLC0415
    from vllm.model_executor.layers.quantization.utils import quant_utils  # noqa: PLC0415

    model = {
        **GPT_OSS,
        "activation": MoEActivation.SWIGLUOAI,
        "routing_method": moe.RoutingMethodType.Renormalize,
        "in_dtype": torch.bfloat16,
        "moe_parallel_config": moe.FusedMoEParallelConfig.make_no_parallel(),
    }
    answers = []
    for case in cases:
        vllm.utils.deep_gemm.is_deep_gemm_supported.cache_clear()
        installed = {name for name in ("flashinfer", "deep_gemm") if case.get(name)}
        if case["capability"]:
            claim_cuda(case["capability"])
        warnings: list[str] = []
        mxfp4.logger.warning_once = lambda message, *values, warnings=warnings, **_: warnings.append(message % values)
        backend = error = None
        try:
            module, function, *names = case.get("selector", ("mxfp4", "select_mxfp4_moe_backend"))
            oracle = importlib.import_module(f"{mxfp4.__package__}.{module}")
            # No model is loaded, so no activations are overridden; the real function needs a running engine's config.
            text = SimpleNamespace(model_type=case.get("model_type"))
            current = SimpleNamespace(model_config=SimpleNamespace(quantization_config=None, hf_text_config=text))
            vars(oracle)["get_current_vllm_config"] = lambda current=current: current
            layer = {**model, **case["config"]}
            if "routing" in case:  # a row of families.toml names both
                layer["activation"] = MoEActivation(layer["activation"])
                layer["routing_method"] = moe.RoutingMethodType[case["routing"]]
            keys = [getattr(quant_utils, name) for name in names]
            backend = getattr(oracle, function)(moe.FusedMoEConfig(**layer), *keys)[0].value
        except (ValueError, NotImplementedError) as refusal:
            error = str(refusal)
        answers.append({"backend": backend, "error": error, "warnings": warnings})
    return answers


def claim_cuda(capability: list[int]) -> None:
    """Make the imported platform object answer as CUDA, because the CPU build cannot be imported as CUDA."""
    import vllm.platforms  # noqa: PLC0415
    from vllm.platforms.interface import DeviceCapability, PlatformEnum  # noqa: PLC0415

    platform = type(vllm.platforms.current_platform)
    platform._enum = PlatformEnum.CUDA  # noqa: SLF001
    platform.device_name = platform.device_type = "cuda"
    platform.get_device_capability = classmethod(lambda cls, device_id=0: DeviceCapability(*capability))  # noqa: ARG005
    # As vllm/platforms/cuda.py, whose import needs the CUDA build.
    platform.supports_fp8 = classmethod(lambda cls: cls.has_device_capability(89))
    platform.support_deep_gemm = classmethod(lambda cls: capability[0] in (9, 10, 12))  # noqa: ARG005


def main() -> None:
    """Answer the questions; the parser first, on the real platform."""
    question = json.load(sys.stdin)
    import vllm  # noqa: PLC0415

    answer: dict[str, Any] = {"version": vllm.__version__, "source": str(Path(vllm.__file__).parent)}
    for name, part, ask in (
        ("profiles", "profiles", lambda: parse(question["parser"], question["profiles"])),
        ("selections", "cases", lambda: select(question["cases"])),
    ):
        try:
            answer[name] = ask() if question.get(part) else None
        except Exception as error:  # noqa: BLE001 - a release may have moved any name; the error is the answer
            answer[name] = {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
