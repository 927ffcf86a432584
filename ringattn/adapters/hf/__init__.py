"""Hugging Face models over ranks: ``attn_implementation="ringattn"``.

    import ringattn.hf                                              # registers the attention and the mask function
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="ringattn")
    with ringattn.hf.sequence(model, batch, mesh["cp"]) as local:   # whole rows in, this rank's shards out
        loss = model(**local).loss                                  # this rank's part: parts and gradients add up

or, with the Trainer, ``class MyTrainer(ringattn.hf.RingTrainerMixin, Trainer)``; the same with trl's ``SFTTrainer``,
``DPOTrainer``, ``KTOTrainer``, ``RewardTrainer`` and ``GRPOTrainer``.

:mod:`.sequence` owns the plans of one batch, one per kind of mask: they know documents, padding and global positions,
which a model that sees a shard cannot know. The mask function of :mod:`.interface` hands such a plan to the layers in
place of a mask, so that a layer that is computed again in the backward finds the same plan; its attention function runs
it. :mod:`.checks` refuses by name what cannot be exact. Load the vision tower of a model of images with another
attention: ``attn_implementation={"text_config": "ringattn", "vision_config": "sdpa"}``.

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
