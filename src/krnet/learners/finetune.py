"""Fine-tuning: each task trains the whole network on its own images; nothing prevents forgetting.

The lower bound. By default the cross entropy covers all classes seen, as in Mammoth and Avalanche. ce="new" is the
choice of PyCIL and FACIL: it leaves the old logits untouched and so ends a little higher.
"""

from __future__ import annotations

from collections.abc import Iterator

from krnet.learners.base import Learner, Work, register


@register
class FineTune(Learner):
    name = "finetune"

    def learn(self, task: int) -> Iterator[Work]:
        self.expand(task)
        if task == 0:
            yield self.base_work()
            return
        loss = lambda images, labels: self.classification_loss(self.model(images), labels)  # noqa: E731
        yield self.descent("classifier", self.batches(self.context.task_ids(task)), loss)
