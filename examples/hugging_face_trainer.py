"""Hugging Face Trainer with its own progress bar and TensorBoard; misa adds one line.

    python -m examples.hugging_face_trainer --budget 40MiB
"""

from __future__ import annotations

from pathlib import Path

from misa.integrations.transformers import manage_trainer
from transformers import Trainer, TrainingArguments

from examples.common import Text, arguments, begin, make_model, tell


def main() -> None:
    options = arguments(__doc__)
    data = Text(options)
    begin()
    trainer = Trainer(
        model=make_model(options),
        args=TrainingArguments(
            output_dir=str(Path(options.out) / "hugging_face"), max_steps=options.steps,
            per_device_train_batch_size=options.rows, learning_rate=1e-3, lr_scheduler_type="cosine", warmup_steps=2,
            weight_decay=0.1, max_grad_norm=1.0, logging_steps=max(1, min(5, options.steps // 2)), save_strategy="no", report_to=["tensorboard"], seed=7,
            use_cpu=True, dataloader_pin_memory=False),
        train_dataset=data,
    )
    if options.budget:
        manage_trainer(trainer, budget=options.budget)
    trainer.train()
    tell(trainer.model, trainer.optimizer.optimizer, [entry["loss"] for entry in trainer.state.log_history if "loss" in entry])


if __name__ == "__main__":
    main()
