"""Make chats and a small tokenizer with a chat template, for pipelines/sft.yaml. Needs `pip install 'loaderkit[tokenize]'`.

    python examples/make_chats.py data/sft
    SFT=$PWD/data/sft loaderkit run pipelines/sft.yaml --batches 20

`chats.jsonl` has a chat a line: {"messages": [{"role": "user", "content": ...}, ...]}. The template has `{% generation %}`
around what the assistant says, so that `mask: prompt` knows it.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

TEMPLATE = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' }}
    {%- if message['role'] == 'assistant' %}
        {%- generation %}
            {{- message['content'] + '<|im_end|>' }}
        {%- endgeneration %}
    {%- else %}
        {{- message['content'] + '<|im_end|>' }}
    {%- endif %}
    {{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
SPECIAL = {"pad_token": "<|pad|>", "bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
TEXT = (
    "the a cat dog river mountain city train code function loop gradient batch learns writes reads explains runs "
    "quickly slowly carefully because when if then please could you tell me how why what is an of to in with"
)
WORDS = TEXT.split()


def sentence(rng: random.Random, least: int, most: int) -> str:
    return " ".join(rng.choices(WORDS, k=rng.randint(least, most))).capitalize() + "."


def chat(rng: random.Random) -> dict[str, list[dict[str, str]]]:
    messages = [{"role": "system", "content": "You answer in one sentence."}] if rng.random() < 0.3 else []
    for _ in range(rng.randint(1, 4)):
        messages.append({"role": "user", "content": sentence(rng, 5, 40)})
        messages.append({"role": "assistant", "content": sentence(rng, 10, 80)})
    return {"messages": messages}


def write_tokenizer(folder: Path, rng: random.Random) -> None:
    """The files that `AutoTokenizer.from_pretrained` reads."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1000,
        special_tokens=[*SPECIAL.values()],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([sentence(rng, 20, 60) for _ in range(500)], trainer)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **SPECIAL}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--chats", type=int, default=2000)
    args = parser.parse_args()
    rng = random.Random(0)
    write_tokenizer(args.folder / "tokenizer", rng)
    with open(args.folder / "chats.jsonl", "w") as file:
        file.writelines(json.dumps(chat(rng)) + "\n" for _ in range(args.chats))
    print(f"{args.chats} chats in {args.folder}")


if __name__ == "__main__":
    main()
