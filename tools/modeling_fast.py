"""
Wrap the fast model for transformers. `convert.py` copies this file, model_fast.py and
model.py into the folder it writes, so an export runs the code that trained it.

Import this file lazily, because training does not need transformers.
"""

from dataclasses import replace

from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from model_fast import build_model, config_from_dict


class FastConfig(PreTrainedConfig):
    """
    Represents config.json. Its key model_config is a checkpoint's, but vocab_size is the size
    before padding.
    """

    model_type = "nightshift_fast"
    # the names that transformers and other programs ask for -> GPT-2's names, as in config.json
    attribute_map = dict(num_hidden_layers="n_layer", max_position_embeddings="n_positions")


class FastForCausalLM(PreTrainedModel, GenerationMixin):
    config_class = FastConfig

    def __init__(self, config: FastConfig):
        super().__init__(config)
        sizes = config_from_dict(config.model_config)
        self.model = build_model(replace(sizes, vocab_size=config.vocab_size))
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """Keep FastGPT's initial weights, where transformers would draw from N(0, 0.02)."""

    def prepare_inputs_for_generation(  # type: ignore[override]  # the rest is in kwargs
        self, input_ids: Tensor, attention_mask: Tensor | None = None, **kwargs
    ) -> dict:
        """Pass all tokens at every step, because there is no cache."""
        return dict(input_ids=input_ids, attention_mask=attention_mask)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: object = None,
        logits_to_keep: int = 0,
        **kwargs,
    ) -> CausalLMOutput:
        """
        Compute logits (B, T, V) from input_ids (B, T), of the last `logits_to_keep` tokens only
        unless that is 0. Raises ValueError for padding before a token, and for a cache or
        positions, which would give wrong logits.
        """
        mask = attention_mask
        if mask is not None and (mask.dim() != 2 or (mask.long().diff() > 0).any()):
            raise ValueError("attention_mask: only right padding works; give prompts one at a time")
        if past_key_values is not None:
            raise ValueError("past_key_values: there is no cache; give all tokens at every step")
        if kwargs.get("position_ids") is not None:
            raise ValueError("position_ids: they are always 0, 1, 2, ...; give one text per row")
        x = self.model.hidden(input_ids.long())
        if logits_to_keep:
            x = x[:, -logits_to_keep:]
        return CausalLMOutput(logits=self.model.logits(x))

    def get_input_embeddings(self) -> nn.Embedding:
        return self.model.transformer.wte

    def get_output_embeddings(self) -> nn.Linear:
        return self.model.lm_head

    def set_input_embeddings(self, value) -> None:
        self.model.transformer.wte = value

    def set_output_embeddings(self, value) -> None:
        self.model.lm_head = value
