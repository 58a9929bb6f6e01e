"""
The fast model for transformers. `convert.py ckpt-to-hf` copies this file, model_fast.py and
model.py into the folder that it writes, so an export runs the code that trained it.

Nothing here imports this file, because training does not need transformers.
"""

import torch
from torch import Tensor
from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from model_fast import build_model, config_from_dict


class FastConfig(PreTrainedConfig):
    """
    config.json. Its key model_config is that of a checkpoint, with the padded vocabulary;
    vocab_size is the size before padding.
    """

    model_type = "nightshift_fast"
    # what transformers and others ask for -> what convert.py calls it, as in GPT-2's config.json
    attribute_map = dict(num_hidden_layers="n_layer", max_position_embeddings="n_positions")


class FastForCausalLM(PreTrainedModel, GenerationMixin):
    config_class = FastConfig

    def __init__(self, config: FastConfig):
        super().__init__(config)
        self.model = build_model(config_from_dict(config.model_config))
        self.post_init()

    def _init_weights(self, module: torch.nn.Module) -> None:
        """FastGPT has initialised the weights; transformers would draw N(0, 0.02)."""

    def prepare_inputs_for_generation(  # type: ignore[override]  # the rest is in kwargs
        self, input_ids: Tensor, attention_mask: Tensor | None = None, **kwargs
    ) -> dict:
        """Pass all tokens at every step: there is no cache."""
        return dict(input_ids=input_ids, attention_mask=attention_mask)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: object = None,
        labels: Tensor | None = None,
        logits_to_keep: int = 0,
        **kwargs,
    ) -> CausalLMOutput:
        """
        input_ids (B, T) -> logits (B, T, V), V without padding; only those of the last
        `logits_to_keep` tokens if it is not 0. The loss is over labels (B, T), which are the
        input_ids; -100 is ignored. Raises ValueError for padding before a token, and for
        past_key_values.
        """
        mask = attention_mask
        if mask is not None and (mask.dim() != 2 or (mask.long().diff() > 0).any()):
            raise ValueError("attention_mask: only right padding; give prompts one at a time")
        if past_key_values is not None:
            raise ValueError("past_key_values: there is no cache; give all tokens at every step")
        x = self.model.hidden(input_ids.long())
        if logits_to_keep:
            x = x[:, -logits_to_keep:]
        logits = self.model.logits(x)[..., : self.config.vocab_size]
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, self.config.vocab_size, **kwargs)
        return CausalLMOutput(loss, logits)
