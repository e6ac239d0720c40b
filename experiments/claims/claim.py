"""Table of the claims: what a paper says, which study tries it, and where its figure is.

A study is a package with two modules. The `main(argv)` of its `__main__` takes --folder,
--plot_only, --smoke and --format. The `judge(results)` of its `rules` returns one row per rule:
{"E20, name of the rule": {"rule", "verdict", numbers ...}}. The rows are stored in `results.json`
under "verdicts".
"""

import pathlib
from typing import NamedTuple


class Claim(NamedTuple):
  """Claim of a paper.

  Attributes:
    name: Name such as "E20", with which the names of its rules begin.
    source: Paper, with its arXiv number.
    study: Import path of the package that tries the claim.
    figure: Path of its figure, relative to the folder of the study.
    says: Claim in one sentence.
    main_rule: Name of the one confirmatory rule, a key of "verdicts" and the value in
      `rules.CONFIRMATORY`. All other rules are exploratory.
    note: Remark that qualifies the verdict, without numbers; may be empty.
  """

  name: str
  source: str
  study: str
  figure: str
  says: str
  main_rule: str
  note: str = ""


ABLATIONS, HERE = "experiments.ablations", "experiments.claims"

ROWS = (
  Claim(
    "E1", "GSPO, arXiv:2507.18071", f"{ABLATIONS}.ratio_lab", "figures/clip_fraction.png",
    says="GSPO clips a hundred times as many tokens as GRPO (0.15 against 0.0013).",
    main_rule="E1, up to 4 updates",
    note="at least ten times in every cell with both above 0, at the paper's number of updates or fewer; not beyond",
  ),
  Claim(
    "E2", "GSPO, arXiv:2507.18071", f"{ABLATIONS}.objective_shapes", "figures/coefficients.png",
    says="GSPO-token has GSPO's gradient if all tokens of a response share one advantage, and only then.",
    main_rule="E2",
  ),
  Claim(
    "E3", "GSPO, arXiv:2507.18071", f"{ABLATIONS}.objective_shapes", "figures/token_weights.png",
    says="GSPO weights all tokens of a response equally; GRPO does not.",
    main_rule="E3",
  ),
  Claim(
    "E4", "GSPO, arXiv:2507.18071", f"{ABLATIONS}.ratio_lab", "figures/ratio_spread.png",
    says="The variance of importance ratios grows with the length of a response; the variance of GSPO's ratio falls.",
    main_rule="E4, std(s)", note="where the log-ratios of tokens are nearly independent, as in this bed",
  ),
  Claim(
    "E5", "GSPO, arXiv:2507.18071", f"{ABLATIONS}.routing_replay", "figures/expert_drift.png",
    says="An update changes about a tenth of the experts that tokens visit, and more in deeper models.",
    main_rule="E5, depth of the model",
  ),
  Claim(
    "E6", "GSPO, arXiv:2507.18071", f"{HERE}.experts", "figures/experts.png",
    says="On a mixture of experts, GRPO collapses without routing replay; GSPO needs none.",
    main_rule="E6, collapses: GRPO above GRPO with R2",
    note="GRPO collapses in 9 of 13 seeds, with a frozen router in 9, with replay in 7, GSPO in none; with nothing to route it does in 8",
  ),
  Claim(
    "E7", "arXiv:2512.01374, arXiv:2510.11370", f"{ABLATIONS}.routing_replay", "figures/sampler_mismatch.png",
    says="Replaying the sampler's routes (R3) brings learner and sampler together.",
    main_rule="E7, KL: R3 below none, N = 4, rate 0.0003",
    note="the claim's second half, that it beats replaying the learner's routes (R2) by more the staler the data, is not tested",
  ),
  Claim(
    "E8", "DAPO, arXiv:2503.14476", f"{ABLATIONS}.dapo_ladder", "figures/mechanisms.png",
    says="Without a higher upper clip, entropy collapses.",
    main_rule="E8, entropy: 0.28 above 0.2", note="entropy does not collapse with the narrow clip either",
  ),
  Claim(
    "E9", "DAPO, arXiv:2503.14476", f"{ABLATIONS}.dapo_ladder", "figures/mechanisms.png",
    says="The token mean keeps long wrong responses in check; the mean over sequences does not.",
    main_rule="E9, length of wrong responses", note="both arms have the soft penalty on length",
  ),
  Claim(
    "E10", "DAPO, arXiv:2503.14476", f"{ABLATIONS}.dapo_ladder", "figures/ladder.png",
    says="Dynamic sampling reaches the same accuracy in fewer steps.",
    main_rule="E10, accuracy at equal steps",
  ),
  Claim(
    "E11", "DAPO, arXiv:2503.14476", f"{ABLATIONS}.dapo_ladder", "figures/ladder.png",
    says="Leaving out truncated responses, or a soft penalty on length, helps.",
    main_rule="E11, filter: accuracy", note="the filter against the same rung without it; the soft penalty alone has no arm",
  ),
  Claim(
    "E12", "SAPO, arXiv:2511.20347", f"{ABLATIONS}.objective_shapes", "figures/zero_mass.png",
    says="The gradient of SAPO is smooth and nowhere zero; the gradients of hard clips are zero on whole regions.",
    main_rule="E12",
  ),
  Claim(
    "E13", "SAPO, arXiv:2511.20347", f"{ABLATIONS}.objective_shapes", "figures/smooth_limit.png",
    says="For small steps and tokens that agree, SAPO is a smooth GSPO, with an error of at most tau^2/4 Var.",
    main_rule="E13, bound on D",
  ),
  Claim(
    "E14", "SAPO, arXiv:2511.20347", f"{ABLATIONS}.objective_shapes", "figures/outliers.png",
    says="If a response has an outlier token, GSPO drops every token; SAPO down-weights the outlier alone.",
    main_rule="E14, SAPO's gate weighs the outlier down", note="this holds for the gate w; w r, which moves the policy, rises",
  ),
  Claim(
    "E15", "SAPO, arXiv:2511.20347", f"{HERE}.gate_asymmetry", "figures/second.png",
    says="A sharper gate for negative advantages than for positive ones is more stable.",
    main_rule="E15, second run: falls, hot rate",
  ),
  Claim(
    "E16", "GSPO, arXiv:2507.18071", f"{HERE}.precision", "figures/mismatches.png",
    says="GSPO tolerates old log-probabilities of lower precision; no recomputation is needed.",
    main_rule="E16, k3 1.5e-3: gspo 15 % needs no recomputation",
    note="at the mismatch of large mixtures of experts, with a band that clips 15 % of the tokens; responses of six tokens",
  ),
  Claim(
    "E17", "MiniRL, arXiv:2512.01374", f"{HERE}.mismatch", "figures/mismatch.png",
    says="On policy, training without the correction for the sampler's mismatch collapses fast, with a drop in entropy.",
    main_rule="E17, accuracy: IS above none, float8",
  ),
  Claim(
    "E18", "Dr. GRPO, arXiv:2503.20783", f"{HERE}.lengths", "figures/lengths.png",
    says="Dividing by the length of a response makes wrong responses longer.",
    main_rule="E18, length of wrong responses at the end",
  ),
  Claim(
    "E19", "CISPO, arXiv:2506.13585", f"{HERE}.rare_tokens", "figures/rare_tokens.png",
    says="PPO's clip stalls rare tokens after an update; clipping the weight instead lets them rise.",
    main_rule="E19, cispo rises",
    note="a bandit, whose pilot had already shown it; holds if the rare token was drawn; in the expectation over all batches it falls",
  ),
  Claim(
    "E20", "VESPO, arXiv:2602.10693", f"{HERE}.staleness", "figures/tuned.png",
    says="With 64 updates of one rollout batch, VESPO ends above GRPO, GSPO and SAPO.",
    main_rule="E20, tuned: VESPO above all three at 64",
    note="responses of six tokens; constants tuned equally, on longer ones; above GSPO and SAPO, not shown to be above GRPO",
  ),
  Claim(
    "E21", "LUSPO, arXiv:2602.05261", f"{HERE}.lengths", "figures/lengths.png",
    says="GSPO makes responses shorter; weighting them by their length does not.",
    main_rule="E21, GSPO shortens against LUSPO",
  ),
  Claim(
    "E23", "GSPO, arXiv:2507.18071", f"{HERE}.tolerance", "figures/tolerance.png",
    says="On a mixture of experts, GSPO tolerates old log-probabilities of lower precision; no recomputation is needed.",
    main_rule="E23, mixture, float8: gspo needs no recomputation",
    note="eight small experts, a float8 sampler beyond published mismatches; on a dense model GSPO tolerates int8",
  ),
  Claim(
    "E24", "GSPO, arXiv:2507.18071", f"{HERE}.long_tolerance", "figures/long_tolerance.png",
    says="On responses of 64 tokens, GSPO tolerates old log-probabilities of lower precision.",
    main_rule="E24, gspo needs no recomputation",
    note="two warm starts, so that the pairs are no sample of policies; GSPO ends at chance in all of them",
  ),
  Claim(
    "E25", "GSPO, arXiv:2507.18071", f"{HERE}.long_responses", "figures/long_responses.png",
    says="The noise of token-level importance ratios accumulates over long responses until training collapses; a sequence ratio does not.",
    main_rule="E25, samples: GSPO's lead over GRPO grows from 16 to 256",
    note="up to 256 tokens and 64 updates of a small dense model; GRPO collapses in few seeds at any length",
  ),
)  # fmt: skip

CLAIMS = {claim.name: claim for claim in ROWS}
"""All claims by name."""

ROOT = pathlib.Path(__file__).parents[2]


def folder_of(claim: Claim) -> pathlib.Path:
  """Returns the folder of a claim's study, where its results are by default."""
  return ROOT / pathlib.Path(*claim.study.split("."))
