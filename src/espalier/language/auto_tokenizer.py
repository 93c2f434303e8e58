"""Whether `transformers.AutoTokenizer` splits text as training did: its classes replace parts of a `tokenizer.json`."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path

from espalier.language.tokenizer import Tokenizer
from espalier.recipe.foreign_files import printable

_TEXT = """A text, naïve; e\u0301 😀 漢字
 I'll  TRY 2,345.67 again\r\n\n\tand more \n
def f(x):
    return {'a': x ** 0x1F}"""
_CLASS = "transformers.PreTrainedTokenizerFast"


def differences(tokenizer: Tokenizer, folder: Path) -> Iterator[str]:
    """How the tokenizer that AutoTokenizer makes of `folder` differs from `tokenizer`; nothing where
    transformers is not installed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            from transformers import AutoTokenizer

            theirs = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
            plain, whole = (theirs(_TEXT, add_special_tokens=special, verbose=False) for special in (False, True))
        except ImportError:
            return
        except Exception as error:  # of a class that does not fit the file it may raise anything
            yield f"transformers.AutoTokenizer does not load its tokenizer: {printable(error)}; {_CLASS} may."
            return
    if plain.input_ids != tokenizer.encode(_TEXT.encode()).tolist():
        yield (
            f"transformers.AutoTokenizer makes it a {type(theirs).__name__}, which splits text otherwise "
            f"than training did: load it with {_CLASS}."
        )
    if (begins := whole.input_ids[0] != plain.input_ids[0]) != tokenizer.adds_boundary:
        puts = "a token" if begins else "nothing"
        yield f"transformers.AutoTokenizer puts {puts} there, whatever add_bos_token says."
