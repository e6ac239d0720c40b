"""A service of the Tinker API with a small random model."""

import jax
import pytest

from jaxrl_llm.models import make_model, preset
from jaxrl_llm.pretrained.byte_tokenizer import ByteTokenizer
from jaxrl_llm.run.jobs.serving import Opened
from jaxrl_llm.serve import server
from jaxrl_llm.serve.tinker import start
from jaxrl_llm.serve.tinker.app import make_app


@pytest.fixture(scope="module")
def tinker_bases():
  model = make_model(preset("nano", vocab_size=264)._replace(tie_embeddings=False))
  opened = Opened(model, model.init(jax.random.key(7)), ByteTokenizer(), "nano", 0)
  bases = {"nano": start.make_base("nano", opened, tokenizer_id=None, context=64, slots=4, max_requests=16)}
  yield bases
  start.close(bases)


@pytest.fixture(scope="module")
def service(tinker_bases, tmp_path_factory):
  app = make_app(tinker_bases, tmp_path_factory.mktemp("states"), rules=server.rules_of("127.0.0.1", None))
  service = server.listen(app, host="127.0.0.1", port=0)
  yield service
  service.close()
