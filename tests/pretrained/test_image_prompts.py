"""Pictures in prompts: the chat template's placeholders, and one token for each merged square."""

import json
import pathlib
import shutil

import pytest

from jaxrl_llm.pretrained.byte_tokenizer import ByteTokenizer
from jaxrl_llm.pretrained.pictures import BadPicture
from jaxrl_llm.pretrained.tokenizer import load_tokenizer

QWEN3 = pathlib.Path(__file__).parent / "tokenizers" / "qwen3"
# What Qwen3-VL's template does with a message's content.
TEMPLATE = (
  "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}{% for c in m.content %}"
  "{% if c.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ c.text }}{% endif %}{% endfor %}{% endif %}"
  "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# The structure of the published one: a system message first, texts or parts of each role, and
# counts of pictures that it writes on request. Tags around the placeholder trim both sides.
PUBLISHED = """{%- macro written(content) %}
    {%- if content is string %}{{- content }}{% else %}
        {%- for part in content %}{%- if 'text' in part %}{{- part.text }}{% endif %}{% endfor %}
    {%- endif %}
{%- endmacro %}
{%- if tools %}
    {{- '<|im_start|>system\\n# Tools\\n' + tools | tojson + '<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + written(messages[0].content) + '<|im_end|>\\n' }}
{%- endif %}
{%- set pictures = namespace(value=0) %}
{%- for message in messages %}
    {%- if message.role == "user" %}
        {{- '<|im_start|>' + message.role + '\\n' }}
        {%- if message.content is string %}
            {{- message.content }}
        {%- else %}
            {%- for part in message.content %}
                {%- if part.type == 'image' or 'image' in part or 'image_url' in part %}
                    {%- set pictures.value = pictures.value + 1 %}
                    {%- if add_vision_id %}Picture {{ pictures.value }}: {% endif -%}
                    <|vision_start|><|image_pad|><|vision_end|>
                {%- elif 'text' in part %}
                    {{- part.text }}
                {%- endif %}
            {%- endfor %}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "assistant" %}
        {{- '<|im_start|>' + message.role + '\\n' + written(message.content) + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
TAIL = "<|im_end|>\n<|im_start|>assistant\n"
START, IMAGE, END = 151652, 151655, 151653  # As in Qwen3's vocabulary.


@pytest.fixture(scope="module", params=[TEMPLATE, PUBLISHED], ids=["short", "published"])
def folder(tmp_path_factory, request):
  path = pathlib.Path(shutil.copytree(QWEN3, tmp_path_factory.mktemp("model") / "model"))
  settings = json.loads((path / "tokenizer_config.json").read_text())
  (path / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": request.param}))
  return path


def test_each_placeholder_becomes_the_tokens_of_its_picture(folder):
  tokenizer = load_tokenizer(folder)
  ids = tokenizer.encode_prompt("From <image> to <image>?", [3, 2])
  pieces = [[START, *[IMAGE] * count, END] for count in (3, 2)]
  head, tail = (tokenizer.encode(text) for text in ("<|im_start|>user\nFrom ", "?<|im_end|>\n<|im_start|>assistant\n"))
  assert ids == [*head, *pieces[0], *tokenizer.encode(" to "), *pieces[1], *tail]
  text_only = tokenizer.encode("<|im_start|>user\n<image><|im_end|>\n<|im_start|>assistant\n")
  assert tokenizer.image_id == IMAGE and tokenizer.encode_prompt("<image>") == text_only
  plain = load_tokenizer(folder, chat=False)
  assert plain.encode_prompt("<image>?", [2]) == [START, IMAGE, IMAGE, END, *plain.encode("?")]


def test_a_template_in_a_file_of_the_processor_is_read(folder, tmp_path):
  path = pathlib.Path(shutil.copytree(folder, tmp_path / "model"))
  settings = json.loads((path / "tokenizer_config.json").read_text())
  (path / "chat_template.json").write_text(json.dumps({"chat_template": settings.pop("chat_template")}))
  (path / "tokenizer_config.json").write_text(json.dumps(settings))
  assert load_tokenizer(path).encode_prompt("<image>?", [2]) == load_tokenizer(folder).encode_prompt("<image>?", [2])


def test_a_system_message_precedes_a_picture(folder):
  tokenizer = load_tokenizer(folder, system="Look.")
  head = tokenizer.encode("<|im_start|>system\nLook.<|im_end|>\n<|im_start|>user\n")
  tail = tokenizer.encode("Why?<|im_end|>\n<|im_start|>assistant\n")
  assert tokenizer.encode_prompt("<image>Why?", [1000]) == [*head, START, *[IMAGE] * 1000, END, *tail]


@pytest.mark.parametrize("make", [ByteTokenizer, None])
def test_counts_that_differ_are_refused_with_both(make, folder):
  tokenizer = make() if make else load_tokenizer(folder)
  with pytest.raises(BadPicture, match="2 marks <image> in the prompt, but 1 pictures"):
    tokenizer.encode_prompt("<image><image>?", [4])


def test_a_placeholder_in_the_users_text_is_text(folder):
  for chat in (True, False):
    ids = load_tokenizer(folder, chat=chat).encode_prompt("<image> is <|image_pad|>?", [4])
    assert ids.count(IMAGE) == 4 and load_tokenizer(folder).decode(ids).endswith(" is <|image_pad|>?" + TAIL * chat)
  with pytest.raises(BadPicture, match="2 image tokens in the prompt, but 1 pictures"):
    load_tokenizer(folder, special_tokens="tokens").encode_prompt("<image> is <|image_pad|>?", [4])


def test_a_template_that_leaves_pictures_out_is_refused(folder):
  tokenizer = load_tokenizer(folder)
  template = tokenizer.chat_template._replace(source=tokenizer.chat_template.source.replace("<|image_pad|>", ""))
  object.__setattr__(tokenizer, "chat_template", template)
  with pytest.raises(BadPicture, match="0 image tokens in the prompt, but 1 pictures"):
    tokenizer.encode_prompt("<image>?", [4])
