"""Hugging Face models over ranks: ``attn_implementation="ringattn"``.

    import ringattn.hf                                              # registers the attention and the mask function
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="ringattn")
    with ringattn.hf.sequence(model, batch, mesh["cp"]) as local:   # whole rows in, this rank's shards out
        loss = model(**local).loss                                  # this rank's part: parts and gradients add up

or, with the Trainer, ``class MyTrainer(ringattn.hf.RingTrainerMixin, Trainer)``; the same with trl's ``SFTTrainer``,
``DPOTrainer``, ``KTOTrainer``, ``RewardTrainer`` and ``GRPOTrainer``.

* :mod:`.sequence` owns the plans of one batch, one per kind of mask. They know documents, padding and global positions,
  which a model that sees a shard cannot know.
* :mod:`.interface` holds the two functions that transformers calls. The mask function makes no mask: it hands the
  plan to the layers in place of a mask, so that a layer that is computed again in the backward finds the same plan.
  The attention function runs the plan. :mod:`.probe` compares the model's own mask with the plan's.
* :mod:`.spans` reads images and prefixes, whose tokens see each other, from whole rows; :mod:`.images` takes the
  features of images that belong to this rank's tokens, and M-RoPE's positions of whole rows (Gemma, PaliGemma, Qwen-VL,
  InternVL, LLaVA and others; load the vision tower with another attention:
  ``attn_implementation={"text_config": "ringattn", "vision_config": "sdpa"}``).
* :mod:`.older` gives GPT-J, GPT-Neo and Falcon an attention of ringattn's; :mod:`.hybrids` runs short convolutions and
  the gated delta rule over ranks (LFM2, Qwen3-Next, Qwen3.5).
* :mod:`.checks` refuses by name what cannot be exact: dropout, masks that are not intervals, caches, layers that carry
  a state along the sequence or count the tokens of a shard, heads that pick tokens, losses that are not sums over
  tokens.
* :mod:`.trainer` holds the overrides of the Trainer, accelerate and trl.

One difference from one process remains: the first token of a document is not a target, even where transformers
predicts it from left padding or, packed by ``position_ids``, from the document before.
"""

from .versions import TRIED

_OLDEST = TRIED["transformers"][0]

try:
    import transformers
except ImportError as error:
    raise ImportError(
        f"ringattn.hf needs transformers >= {_OLDEST}: pip install 'transformers>={_OLDEST}' ({error})"
    ) from error
if [int(part) for part in transformers.__version__.split(".")[:2]] < [int(part) for part in _OLDEST.split(".")]:
    raise ImportError(
        f"transformers is {transformers.__version__}, but ringattn.hf needs >= {_OLDEST}: pip install -U transformers"
    )
