"""vLLM's FlashAttention backend, with the kernel of kernels/attention.py for decoding: one launch instead of five.

If each sequence of a step has one new token, a single kernel does rotary embedding, KV cache update, attention and the
reduction over splits. For prompts, one kernel rotates query and key and updates the cache, then FlashAttention runs.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.config import get_current_vllm_config
from vllm.logger import init_logger
from vllm.model_executor.layers.rotary_embedding import _ROPE_DICT, YaRNScalingRotaryEmbedding
from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend, FlashAttentionImpl, FlashAttentionMetadata

from spark_mxfp4.kernels import attention
from spark_mxfp4.kernels.attention import MOST_TOKENS, WIDTH, Cache, Layer, Projections
from spark_mxfp4.vllm.norms import replace_norms

logger = init_logger(f"vllm.{__name__}")
BF16_CACHES = ("auto", "bfloat16")


class SparkAttentionBackend(FlashAttentionBackend):
    """FlashAttention with layers that update the KV cache themselves."""

    forward_includes_kv_cache_update: bool = True

    @staticmethod
    def get_impl_cls() -> type[FlashAttentionImpl]:
        """Return the class of the layers' implementation."""
        return SparkAttentionImpl


class SparkAttentionImpl(FlashAttentionImpl):
    """An attention layer that runs steps of up to MOST_TOKENS sequences, one new token each, in one launch."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config = get_current_vllm_config()
        device = torch.device(config.device_config.device_type)
        self.fused = (
            attention.device_fits(device)
            and attention.heads_fit(self.num_heads, self.num_kv_heads, self.head_size)
            and self.kv_cache_dtype in BF16_CACHES
            and config.model_config.dtype == torch.bfloat16
            and config.parallel_config.decode_context_parallel_size == 1
            and not config.parallel_config.use_ubatching  # launches of a layer that overlap would share its counters
            and (self.alibi_slopes, self.logits_soft_cap, self.kv_sharing_target_layer_name) == (None, 0, None)
        )
        if self.fused:
            attention.load(device)  # compile now, so that neither the first step nor a graph capture waits
            replace_norms()  # here, because vLLM constructs a layer's attention before its norms
            rotation = _take_over_rotation(config)
            window = self.sliding_window[0] + 1  # 0: all tokens
            tickets = attention.counters(self.num_kv_heads, device)
            self.layer = Layer(self.scale, tickets, window, self.sinks, rotation)
            # vLLM hashes additional_config into the key of its compile cache. The traced graph depends on this setting.
            if isinstance(extra := config.additional_config, dict):
                extra["spark_mxfp4:attention"] = "as rotated" if rotation is None else "rotates"
            logger.info_once("Attention of up to %s sequences runs in one launch.", MOST_TOKENS, scope="process")

    def forward(  # noqa: PLR0913, PLR0917 (vLLM's signature)
        self,
        layer: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: FlashAttentionMetadata,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Update the KV cache and attend; the arguments are those of FlashAttentionImpl.forward."""
        if attn_metadata is None:  # vLLM's memory profiling
            return output.fill_(0)
        step, tokens = attn_metadata, attn_metadata.num_actual_tokens
        new = Projections(query[:tokens], key[:tokens], value[:tokens])
        cache = Cache(kv_cache, step.block_table, step.seq_lens, step.slot_mapping)
        if self.fused and step.max_query_len == 1 and tokens <= MOST_TOKENS and step.causal is True:
            attention.attend(new, cache, self.layer, output)
            return output
        if self.fused and self.layer.rotation is not None:
            query = attention.rotate_and_store(new, cache, step.query_start_loc, self.layer.rotation)
        else:
            self.do_kv_cache_update(layer, key, value, kv_cache, step.slot_mapping)
        result: torch.Tensor = super().forward(
            layer, query, key, value, kv_cache, step, output, output_scale, output_block_scale
        )
        return result


def _take_over_rotation(config: Any) -> torch.Tensor | None:
    """Switch off the model's rotary embedding, and return its cosines and sines, float32 [positions, 64].

    Return None and change nothing if an attention layer's embedding cannot be determined: for models with a draft model
    or several embeddings, and for other kinds of embeddings.
    """
    embeddings = [embedding for embedding in _ROPE_DICT.values() if isinstance(embedding, YaRNScalingRotaryEmbedding)]
    if len(embeddings) != 1:
        return None
    [embedding] = embeddings
    takes = (
        config.speculative_config is None
        and embedding.is_neox_style
        and (embedding.head_size, embedding.rotary_dim) == (WIDTH, WIDTH)
        and embedding.cos_sin_cache.dtype == torch.float32
    )
    embedding._forward_method = _unchanged if takes else embedding.dispatch_forward(compile_native=False)  # noqa: SLF001 (CustomOp's dispatch)
    return embedding.cos_sin_cache if takes else None


def _unchanged(_positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return query, key
