"""The client of verifiers that draws from the engine of this process."""

from collections.abc import Mapping
from typing import Any

from jaxrl_llm.rollouts.environments.hub.conversation import ProgramConversation, ProgramTurn, TurnRefused

MODEL = "policy"


def make_client(conversations: Mapping[str, ProgramConversation]) -> Any:
  """Makes a client of the interception server.

  Args:
    conversations: Conversations in progress by the id of their trace.
  """
  from verifiers.v1.clients import Client
  from verifiers.v1.clients.train import serialize_completion, tool_to_wire
  from verifiers.v1.dialects import ChatDialect
  from verifiers.v1.dialects.chat import message_to_wire
  from verifiers.v1.errors import ProviderError
  from verifiers.v1.types import AssistantMessage, Response, ToolCall, TurnTokens, Usage

  class EngineClient(Client):
    """Draws the turns of the run's policy."""

    async def get_response(self, dialect, body, sampling, session_id=None, turn=None, headers=None) -> Response:
      """Draws one turn; see `Client`."""
      if not isinstance(dialect, ChatDialect) or turn is None:
        raise NotImplementedError(f"the policy answers chat completions, and no {type(dialect).__name__}")
      if session_id not in conversations:
        raise ProviderError("the conversation is over", status_code=400)
      conversation, before = conversations[session_id], turn.previous_renderer_token_ids()
      known = None if before is None else [*before[0], *before[1]]
      limit = body.get("max_completion_tokens") or body.get("max_tokens")
      try:
        drawn = await conversation.draw(
          [message_to_wire(message) for message in turn.prompt],
          [tool_to_wire(tool) for tool in turn.tools],
          known,
          len(turn.tail),
          limit if isinstance(limit, int) else None,
        )
      except TurnRefused as error:
        raise ProviderError(str(error), status_code=400) from error
      response = self.response(drawn, len(conversation.draft.turns))
      response.raw = serialize_completion(response, MODEL)
      return response

    def response(self, drawn: ProgramTurn, turn: int) -> Response:
      """Returns a turn in the words of verifiers, with its tokens."""
      calls = [ToolCall(id=f"call_{turn}_{i}", name=call.name, arguments=call.arguments) for i, call in enumerate(drawn.calls)]
      return Response(
        id=f"turn_{turn}",
        created=0,
        model=MODEL,
        message=AssistantMessage(content=drawn.text or None, tool_calls=calls or None),
        finish_reason="tool_calls" if calls else "stop" if drawn.stopped else "length",
        usage=Usage(prompt_tokens=len(drawn.prompt), completion_tokens=len(drawn.tokens)),
        tokens=TurnTokens.model_construct(
          prompt_ids=drawn.prompt, completion_ids=drawn.tokens, completion_logprobs=drawn.logprobs, bridged=drawn.is_bridged
        ),
      )

  return EngineClient()
