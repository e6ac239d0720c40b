"""Pictures in prompts: the chat template's placeholders, and one token for each merged square."""

import pathlib
import shutil

import pytest

from jaxrl_llm.pretrained.byte_tokenizer import ByteTokenizer
from jaxrl_llm.pretrained.pictures import BadPicture
from jaxrl_llm.pretrained.tokenizer import load_tokenizer
from tests.pretrained.chats import SOURCES
from tests.pretrained.test_tokenizer import QWEN3, edit

# What Qwen3-VL's template does with a message's content.
TEMPLATE = (
  "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}{% for c in m.content %}"
  "{% if c.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ c.text }}{% endif %}{% endfor %}{% endif %}"
  "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
START, IMAGE, END = 151652, 151655, 151653  # As in Qwen3's vocabulary.


@pytest.fixture(scope="module", params=[TEMPLATE, SOURCES["qwen3.5"][0]], ids=["short", "qwen3.5"])
def folder(tmp_path_factory, request):
  path = pathlib.Path(shutil.copytree(QWEN3, tmp_path_factory.mktemp("model") / "model"))
  edit(path, chat_template=request.param)
  return path


@pytest.fixture
def tail(folder):
  """Text that the template writes behind the user's."""
  return "<|im_end|>\n<|im_start|>assistant\n" + "<think>\n" * ("<think>" in load_tokenizer(folder).chat_template.source)


def test_each_placeholder_becomes_the_tokens_of_its_picture(folder, tail):
  tokenizer = load_tokenizer(folder)
  ids = tokenizer.encode_prompt("From <image> to <image>?", [3, 2])
  pieces = [[START, *[IMAGE] * count, END] for count in (3, 2)]
  texts = [tokenizer.encode(text) for text in ("<|im_start|>user\nFrom ", " to ", f"?{tail}")]
  assert ids == [*texts[0], *pieces[0], *texts[1], *pieces[1], *texts[2]]
  text_only = tokenizer.encode(f"<|im_start|>user\n<image>{tail}")
  assert tokenizer.image_id == IMAGE and tokenizer.encode_prompt("<image>") == text_only
  plain = load_tokenizer(folder, chat=False)
  assert plain.encode_prompt("<image>?", [2]) == [START, IMAGE, IMAGE, END, *plain.encode("?")]


def test_a_template_in_a_file_of_the_processor_is_read(folder, tmp_path):
  path = pathlib.Path(shutil.copytree(folder, tmp_path / "model"))
  edit(path, "chat_template.json", chat_template=load_tokenizer(folder).chat_template.source)
  edit(path, chat_template=None)
  assert load_tokenizer(path).encode_prompt("<image>?", [2]) == load_tokenizer(folder).encode_prompt("<image>?", [2])


def test_a_system_message_precedes_a_picture(folder, tail):
  tokenizer = load_tokenizer(folder, system="Look.")
  head = tokenizer.encode("<|im_start|>system\nLook.<|im_end|>\n<|im_start|>user\n")
  assert tokenizer.encode_prompt("<image>Why?", [1000]) == [*head, START, *[IMAGE] * 1000, END, *tokenizer.encode(f"Why?{tail}")]


@pytest.mark.parametrize("make", [ByteTokenizer, None])
def test_counts_that_differ_are_refused_with_both(make, folder):
  tokenizer = make() if make else load_tokenizer(folder)
  with pytest.raises(BadPicture, match="2 marks <image> in the prompt, but 1 pictures"):
    tokenizer.encode_prompt("<image><image>?", [4])


def test_a_placeholder_in_the_users_text_is_text(folder, tail):
  for chat in (True, False):
    ids = load_tokenizer(folder, chat=chat).encode_prompt("<image> is <|image_pad|>?", [4])
    assert ids.count(IMAGE) == 4 and load_tokenizer(folder).decode(ids).endswith(" is <|image_pad|>?" + tail * chat)
  with pytest.raises(BadPicture, match="2 image tokens in the prompt, but 1 pictures"):
    load_tokenizer(folder, special_tokens="tokens").encode_prompt("<image> is <|image_pad|>?", [4])


def test_a_template_that_leaves_pictures_out_is_refused(folder):
  tokenizer = load_tokenizer(folder)
  template = tokenizer.chat_template._replace(source=tokenizer.chat_template.source.replace("<|image_pad|>", ""))
  object.__setattr__(tokenizer, "chat_template", template)
  with pytest.raises(BadPicture, match="0 image tokens in the prompt, but 1 pictures"):
    tokenizer.encode_prompt("<image>?", [4])
