"""A classifier of a dozen operators, for what is about the Trainer and not about the model: tracing a transformer of
one layer takes five times as long."""

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import SequenceClassifierOutput

WIDTH, WIDE, CLASSES, VOCABULARY = 16, 24, 3, 97


class SmallConfig(PretrainedConfig):
    model_type = "small"

    def __init__(self, dropout: float = 0.0, **others: object) -> None:
        super().__init__(**others)
        self.dropout = dropout


class Block(nn.Module):
    """What follows the attention in a layer of GPT-2."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.act, self.down = nn.Linear(WIDTH, WIDE), nn.GELU(), nn.Linear(WIDE, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.down(self.act(self.up(self.norm(x)))))


class SmallForSequenceClassification(PreTrainedModel):
    config_class = SmallConfig
    supports_gradient_checkpointing = False

    def __init__(self, config: SmallConfig) -> None:
        super().__init__(config)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layer = nn.ModuleList([Block(config.dropout)])
        self.head = nn.Linear(WIDTH, CLASSES)
        self.post_init()

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
    ) -> SequenceClassifierOutput:
        x = self.embedding(input_ids)
        for block in self.layer:
            x = block(x)
        logits = self.head((x * attention_mask[:, :, None]).mean(1))
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        return SequenceClassifierOutput(loss=loss, logits=logits)
