"""
The fast model for transformers. `convert.py ckpt-to-hf` copies this file, model_fast.py and
model.py into the folder that it writes: an export computes by the very lines that trained it.

Nothing imports this file here, as training needs no transformers.
"""

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer
from transformers.modeling_outputs import CausalLMOutputWithPast

from model import GPTConfig
from model_fast import FastGPT


class FastConfig(PreTrainedConfig):
    """config.json. Its key model_config holds GPTConfig's fields."""

    model_type = "nightshift_fast"
    # what transformers and others ask for -> what convert.py calls it, as in GPT-2's config.json
    attribute_map = dict(num_hidden_layers="n_layer", max_position_embeddings="n_positions")


class LayerCache:
    """One layer of transformers' cache, with the interface of model.py's KVCache."""

    def __init__(self, cache: Cache, layer: int):
        self.cache, self.layer, self.length = cache, layer, cache.get_seq_length(layer)

    def extend(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        self.length += k.size(2)
        return self.cache.update(k, v, self.layer)


class FastForCausalLM(PreTrainedModel, GenerationMixin):
    config_class = FastConfig

    def __init__(self, config: FastConfig):
        super().__init__(config)
        self.model = FastGPT(GPTConfig(**config.model_config))
        self.post_init()

    def _init_weights(self, module: torch.nn.Module) -> None:
        """FastGPT has done it, where transformers would draw N(0, 0.02)."""

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        use_cache: bool | None = None,
        labels: Tensor | None = None,
        logits_to_keep: int = 0,
        **kwargs,
    ) -> CausalLMOutputWithPast:
        """
        input_ids (B, T), after what is in past_key_values -> logits (B, T, V), or those of the last
        `logits_to_keep` tokens, where it is not 0. The loss is over labels (B, T), the tokens
        themselves; -100 counts for nothing. Raises ValueError for a mask with padding before a
        token.
        """
        mask = attention_mask
        if mask is not None and (mask.dim() != 2 or (mask.long().diff() > 0).any()):
            raise ValueError("attention_mask: can hide the end only; give prompts one at a time")
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache()
        caches, parts = None, [input_ids.long()]
        if past_key_values is not None:
            # transformers counts the layers; the model's tokens have a cache, too
            while len(past_key_values.layers) < len(self.model.new_caches(0)):
                past_key_values.layers.append(DynamicLayer())
            caches = [LayerCache(past_key_values, n) for n in range(len(past_key_values.layers))]
            if caches[0].length > 0:
                parts = parts[0].split(1, dim=1)  # as FastGPT asks where the caches hold tokens
        x = torch.cat([self.model.hidden(part, caches) for part in parts], dim=1)
        if logits_to_keep:
            x = x[:, -logits_to_keep:]
        logits, loss = self.model.logits(x), None
        if labels is not None:
            loss = self.loss_function(logits, labels, self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(loss, logits, past_key_values)
