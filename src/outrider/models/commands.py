"""`outrider widen`. Torch is imported when it runs: the other commands start quickly."""

from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from outrider.models import embedded_block_path, embedded_draft_path, embedded_eagle_path, embedded_target_path

# One shard is in memory at a time. A layer of the largest shape fits in; its vocabulary matrix is a shard alone.
_MAX_SHARD_BYTES = 2_000_000_000


def widen(
    role: Annotated[
        Literal["target", "draft", "eagle", "block"],
        typer.Argument(
            help="Which model of the embedded pair; eagle, block: the target's head or block drafter, for a target of "
            "that shape."
        ),
    ],
    shape: Annotated[Literal["160m", "1b", "1b-deep", "8b", "70b"], typer.Argument(help="Llama shape to write it in.")],
    folder: Annotated[Path, typer.Argument(help="New folder for the checkpoint.")],
    *,
    source: Annotated[
        Path | None,
        typer.Option(help="Folder of a Llama checkpoint with tied embeddings in place of the embedded one."),
    ] = None,
    of_target: Annotated[
        Path | None,
        typer.Option(help="With eagle or block and --source: folder of the target that the head is for."),
    ] = None,
    dtype: Annotated[Literal["bfloat16", "float32"], typer.Option(help="Type of the weights.")] = "bfloat16",
    fill: Annotated[bool, typer.Option(help="Random weights, not zeros, where the function stays the same.")] = True,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the random weights.")] = 0,
    max_position_embeddings: Annotated[
        int | None,
        typer.Option(min=1, help="Longest sequence it promises: any number works. Default the small model's."),
    ] = None,
    check: Annotated[
        Literal["layers", "whole", "none"],
        typer.Option(help="Compare logits with the small model: layer by layer, or loaded whole as float32."),
    ] = "layers",
) -> None:
    """Write a small target, draft or head as a checkpoint of a large Llama shape that computes the same logits."""
    import torch

    from outrider.models.widen import (
        check_destination,
        load_small,
        plan_checkpoint,
        shape_with_heads_of,
        write_checkpoint,
    )
    from outrider.models.widened_eagle import WidenedEagle
    from outrider.models.widened_weights import WidenedLlama

    console = Console(highlight=False, soft_wrap=True, stderr=True)
    is_head = role in ("eagle", "block")
    if (source is not None and is_head) is (of_target is None):
        raise typer.BadParameter("needed with eagle or block and --source alone", param_hint="--of-target")
    embedded = {
        "target": embedded_target_path,
        "draft": embedded_draft_path,
        "eagle": embedded_eagle_path,
        "block": embedded_block_path,
    }
    source = source or embedded[role]()
    options: dict[str, Any] = {
        "dtype": getattr(torch, dtype),
        "fill_seed": seed if fill else None,
        "max_position_embeddings": max_position_embeddings,
    }
    llama = of_target or (embedded_target_path() if is_head else source)
    config, weights = load_small(llama)
    large = shape_with_heads_of(shape, config["head_dim"])
    wide = WidenedLlama(config, weights, large, **options)
    model: WidenedLlama | WidenedEagle = wide
    if is_head:
        embedding = weights["model.embed_tokens.weight"]
        model = WidenedEagle(*load_small(source), target=config, embedding=embedding, shape=large, **options)
    plan = plan_checkpoint(model, source, max_shard_bytes=_MAX_SHARD_BYTES)
    console.print(f"{role} as {shape}: {plan.weight_bytes / model.dtype.itemsize / 1e9:.2f} billion weights, "
                  f"{plan.disk_bytes / 1e9:.2f} GB on disk in {len(plan.shards)} files")  # fmt: skip
    check_destination(folder, plan)

    def compare(written: Path) -> None:
        from outrider.models.widen_check import check_checkpoint, check_tokens

        if is_head:
            from outrider.models.widen_eagle_check import check_eagle

            of_head = check_eagle(written, source, llama, wide, check_tokens(llama))
            of_head.raise_if_wrong()
            console.print(f"checked: {of_head}")
            return
        report = check_checkpoint(written, source, check_tokens(source), layer_by_layer=check == "layers")
        report.raise_if_wrong()
        console.print(f"checked {'layer by layer' if check == 'layers' else 'as a whole'}: {report}")

    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("writing", total=plan.weight_bytes)

        def written(partial: Path) -> None:
            progress.update(task, description="written, checking")
            if check != "none":
                compare(partial)
            progress.update(task, description="written")

        def on_written(count: int) -> None:
            progress.advance(task, count)

        write_checkpoint(model, source, folder, plan, before_publishing=written, on_written=on_written)
    typer.echo(folder)
