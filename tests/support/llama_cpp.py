"""What llama.cpp writes after a prompt, through npm's node-llama-cpp.

`npm install node-llama-cpp` installs it in a folder, which the variable NODE_LLAMA_CPP names.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

SCRIPT = """
import {getLlama} from "FOLDER/node_modules/node-llama-cpp/dist/index.js";
const [model, prompt, most] = process.argv.slice(2);
const llama = await getLlama({gpu: false, build: "never", logLevel: "error"});
const loaded = await llama.loadModel({modelPath: model});
const context = await loaded.createContext({contextSize: 512, threads: 1});
const written = [];
const options = {temperature: 0, yieldEogToken: true};
for await (const token of context.getSequence().evaluate(JSON.parse(prompt), options)) {
  written.push(token);
  if (loaded.isEogToken(token) || written.length >= +most) break;
}
console.log(JSON.stringify(written));
process.exit(0);
"""


def greedy(file: Path, prompt: Sequence[int], most: int) -> list[int]:
    """The most likely tokens after `prompt`, with the one that ends the text, at most so many. Skips the test where
    llama.cpp is not there."""
    folder = os.environ.get("NODE_LLAMA_CPP")
    if folder is None or shutil.which("node") is None:
        pytest.skip("no llama.cpp: NODE_LLAMA_CPP names no folder with npm's node-llama-cpp")
    script = file.with_name("greedy.mjs")
    script.write_text(SCRIPT.replace("FOLDER", str(Path(folder).absolute())))
    words = ["node", str(script), str(file.absolute()), json.dumps([*prompt]), str(most)]
    ended = subprocess.run(words, check=False, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    tokens: list[int] = json.loads(ended.stdout.splitlines()[-1])
    return tokens
