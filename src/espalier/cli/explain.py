"""`espalier explain [NAME ...]`: what each system is, when it is chosen, what it costs, and its state; what a word of a
plan means. `espalier explain RUN --energy`: operations, bytes and joules of an inference of the trained model."""

from __future__ import annotations

import argparse
import json

from espalier.recipe import records
from espalier.recipe.errors import UserError
from espalier.recipe.terminal import line, rows, say
from espalier.recipe.units import show_count, show_size


def run(arguments: argparse.Namespace) -> int:
    """Systems in full, words of a plan, or all twenty systems in a table; of a run its energy."""
    if arguments.energy:
        return _energy(arguments)
    words = [records.word(name) or records.get(name) for name in arguments.names]
    if arguments.json:
        tables = [records.as_dict(record) for record in words or records.all_records()]
        print(json.dumps(tables if len(tables) > 1 else tables[0], indent=2))
        return 0
    for number, entry in enumerate(words):
        if number:
            say("")
        if isinstance(entry, records.Word):
            _word(entry)
        else:
            say(records.explain(entry.name))
    if words:
        return 0
    table = [
        (record.name, record.state.partition(":")[0], record.title, record.files[0]) for record in records.all_records()
    ]
    rows(("system", "state", "what it is", "in src/espalier/"), table, cut=True)
    say("\nespalier explain NAME tells more, also of the words of a plan (tp, slack).")
    return 0


def _energy(arguments: argparse.Namespace) -> int:
    """Of each run."""
    if not arguments.names:
        raise UserError("--energy is of a run.", do="espalier explain runs/NAME --energy")
    from espalier.cli.open_run import DataChoice, load_trained
    from espalier.kernels import counts
    from espalier.train import workload_registry
    from espalier.train.workload_row import CountsEnergy

    for name in arguments.names:
        trained = load_trained(name, arguments.trust, DataChoice(predicts=True))
        row = workload_registry.row(trained.recipe)
        if not isinstance(row, CountsEnergy):
            raise UserError(
                f"What an inference of {name} takes is not known.",
                why="it is counted for graph networks and scenes",
                do="espalier.kernels.counts.Counter(model) around a call of the model, in Python",
            )
        energies = row.energy(trained.workload, trained.model)
        parts = counts.table(energies.parts)
        if arguments.json:
            keys = ("part", "macs", "accumulations", "bytes", "joules", "joules_with_dram")
            lines_of_parts = [dict(zip(keys, row, strict=True)) for row in parts]
            more = [{"title": title, "rows": [dict(zip(columns, row, strict=True)) for row in lines]}
                    for title, columns, lines in energies.tables]  # fmt: skip
            print(
                json.dumps(
                    {"of": energies.what, "parts": lines_of_parts, "tables": more, "constants": counts.constants()}
                )
            )
            continue
        say(f"Energy of {energies.what}, step {trained.step} of {name}: a model, not a measurement.")
        total = sum(energies.parts.values(), counts.NOTHING)
        lines = [_told(row) for row in [*parts, *counts.table({"all": total})]]
        rows(("part", "products (few bits as 8-bit ones)", "sums", "bytes", "arithmetic", "with DRAM"), lines)
        for title, columns, table in energies.tables:
            say(f"\n{title}")
            rows(tuple(columns), [tuple(map(str, row)) for row in table])
        say("\nConstants, in pJ (products of few bits: int8, in proportion to the product of the widths):")
        rows(("operation", "pJ", "source"), [(key, f"{value:g}", source) for key, value, source in counts.constants()])
    return 0


def _told(row: tuple[str, float, float, float, float, float]) -> tuple[str, ...]:
    part, macs, sums, moved, arithmetic, whole = row
    counted = (part, show_count(macs), show_count(sums), show_size(moved))
    return (*counted, f"{1e6 * arithmetic:.3g} µJ", f"{1e6 * whole:.3g} µJ")


def _word(word: records.Word) -> None:
    line(f"{word.name}: {word.meaning}")
    if word.option:
        say(f"  option    {word.option} (espalier plan RECIPE --what-if {word.option}=… prices it or says why not)")
    say(f"  page      {word.page}")
