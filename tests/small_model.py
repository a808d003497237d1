"""A classifier of a dozen operators, for tests of the Trainer that do not depend on the model: tracing a transformer
of one layer takes five times as long."""

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import SequenceClassifierOutput

WIDTH, WIDE, CLASSES, VOCABULARY = 16, 24, 3, 97


class SmallConfig(PretrainedConfig):
    """
    Args:
        picks_labelled: whether rows with a negative label are left out of the loss; selecting rows breaks the
            graph, as in DeBERTa's classifier.
        repeats: whether a vector is repeated for each row, as in DeBERTa's attention; one row repeats nothing.
        dropout: dropout probability of the embeddings and of the block.
    """

    model_type = "small"

    def __init__(
        self, picks_labelled: bool = False, repeats: bool = False, dropout: float = 0.0, **others: object
    ) -> None:
        super().__init__(**others)
        self.picks_labelled, self.repeats, self.dropout = picks_labelled, repeats, dropout


class Block(nn.Module):
    """A layer of GPT-2 without its attention."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.act, self.down = nn.Linear(WIDTH, WIDE), nn.GELU(), nn.Linear(WIDE, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.act(self.up(self.norm(x))))


class SmallForSequenceClassification(PreTrainedModel):
    config_class = SmallConfig

    def __init__(self, config: SmallConfig) -> None:
        super().__init__(config)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.scale = nn.Parameter(torch.ones(1, 1, WIDTH)) if config.repeats else None
        self.layer = nn.ModuleList([Block()])
        self.dropout = nn.Dropout(config.dropout)
        self.head = nn.Linear(WIDTH, CLASSES)
        self.post_init()

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor | None = None
    ) -> SequenceClassifierOutput:
        x = self.embedding(input_ids)
        if self.scale is not None:
            x = x * self.scale.repeat(len(input_ids), 1, 1)
        for block in self.layer:
            x = block(self.dropout(x))
        x = self.dropout(x)
        # A mean over unpadded tokens: a row's loss is the same in any batch.
        mask = attention_mask[:, :, None].to(x.dtype)
        logits = self.head((x * mask).sum(1) / mask.sum(1))
        return SequenceClassifierOutput(loss=None if labels is None else self._loss(logits, labels), logits=logits)

    def _loss(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        # transformers' classifiers store the problem type that they infer.
        if self.config.problem_type is None and not self.config.picks_labelled:
            self.config.problem_type = "single_label_classification"
        if self.config.picks_labelled:
            rows = (labels >= 0).nonzero()[:, 0]
            logits, labels = logits[rows], labels[rows]
        return nn.functional.cross_entropy(logits, labels)
