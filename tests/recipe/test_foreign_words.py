"""Words of other programs for options lead to those here: as keys of a recipe, as changes and as flags."""

from __future__ import annotations

import pytest

from espalier.cli import main as cli
from espalier.recipe import recipe_errors, recipe_file
from espalier.recipe.data_table import data_table
from espalier.recipe.errors import UserError

ROWS = data_table(recipe_errors.__file__)["lead"]
WORDS = {word: row for row in ROWS for word in row["words"].split()}
FIELD = """
train.lr train.batch learning_rate epochs gpus batch_size max_steps num_epochs weight_decay warmup_steps lr_scheduler
gradient_accumulation_steps hidden_size num_layers num_heads n_layer n_head d_model seq_len max_length block_size
vocab_size dtype bf16 fp16 mixed_precision grad_clip max_grad_norm device num_workers output_dir save_steps eval_steps
logging_steps world_size nproc_per_node zero_stage fsdp deepspeed lora_r lora_alpha train.max_steps model.n_layers
train.epochs lr seed steps depth tp pp dp
"""
SECTIONS = {"seed": "train", "steps": "train", "tp": "plan.pin", "pp": "plan.pin", "dp": "plan.pin"}
"""Of the words that are names of options already."""


def refused(table: dict[str, object], *overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        recipe_file.from_table(table, "recipe", overrides)
    return str(caught.value)


def test_every_word_leads_to_an_option_that_there_is() -> None:
    flags = {row["name"].split()[0] for row in cli.ARGUMENTS}
    assert len(WORDS) == sum(len(row["words"].split()) for row in ROWS) > 200
    for word, row in WORDS.items():
        assert row.get("to") or row.get("note"), word
        assert row.get("to", "name") in flags.union(recipe_errors.known_keys()), word


@pytest.mark.parametrize("word", FIELD.split())
def test_a_word_of_the_field_leads_to_ours_as_key_change_and_flag(
    word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    row = WORDS.get(word.rpartition(".")[2], {})
    meant = row.get("to", "") if row else f"{SECTIONS[word]}.{word}"
    table: dict[str, object] = {word: 1} if "." not in word else {word.partition(".")[0]: {word.partition(".")[2]: 1}}
    for said in (refused(table), refused({}, f"{word}=1")):
        assert (f"did you mean {meant}?" if meant else row["note"]) in said
    flag = "--" + word.replace("_", "-")
    with pytest.raises(SystemExit, match="2"):
        cli.main(["train", "recipe.toml", flag, "1"])
    errors = capsys.readouterr().err
    assert f"unrecognized argument: {flag}" in errors
    assert (f"did you mean {meant}" if meant else row["note"]) in errors


@pytest.mark.parametrize(
    ("change", "meant"),
    [
        ("train.optimizer=sgd", 'train.optimizer.kind = "adamw"'),
        ("train.schedule=linear", 'train.schedule.kind = "stable"'),
        ("train.precision=bf16-mixed", 'train.precision = "bf16"'),
        ("model.kind=llama", 'model.kind = "gpt"'),
    ],
)
def test_other_words_for_a_choice_lead_to_it(change: str, meant: str) -> None:
    assert meant in refused({}, change)


@pytest.mark.parametrize(
    ("words", "fields"),
    [
        ("predict RUN --temperature 0 text", {"run": "RUN", "input": "text", "temperature": 0.0}),
        ("predict --temperature 0 RUN text", {"run": "RUN", "input": "text", "temperature": 0.0}),
        ("--temperature 0 predict RUN text", {"run": "RUN", "input": "text", "temperature": 0.0}),
        ("predict -- RUN -text", {"run": "RUN", "input": "-text"}),
        ("train --run here r.toml train.steps=5 --json", {"run": "here", "overrides": ["train.steps=5"], "json": True}),
        ("train train.steps=5 --json r.toml", {"recipe": "r.toml", "overrides": ["train.steps=5"]}),
        ("eval --task a=b RUN --task c=d", {"run": "RUN", "task": ["a=b", "c=d"]}),
        ("report a --serve b", {"runs": ["a", "b"], "serve": True}),
        ("plan", {"recipe": None, "overrides": []}),
    ],
)
def test_options_may_stand_anywhere(words: str, fields: dict[str, object]) -> None:
    arguments = vars(cli.parsed(words.split()))
    assert {name: arguments[name] for name in fields} == fields


@pytest.mark.parametrize("words", ["VERB -h", "-h VERB", "VERB a -h b", "help VERB", "--json VERB --help"])
@pytest.mark.parametrize("verb", cli.VERBS)
def test_help_of_a_verb_is_asked_for_anywhere(words: str, verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.parsed(words.replace("VERB", verb).split())
    assert ended.value.code == 0
    assert f"usage: espalier {verb}" in capsys.readouterr().out
