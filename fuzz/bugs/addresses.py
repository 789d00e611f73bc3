"""Addresses and layouts: accesses that leave a buffer, and bytes read in another form than they
were written in."""

from __future__ import annotations

from fuzz.bugs.registry import bug

# accesses that leave a buffer

bug(
    "flash-linear-attention#1134",
    "A kernel loads the decay gate for channels beyond the head's width without a mask; what lies "
    "there times a masked zero is NaN, and spoils the row.",
    by=("decay_read_past_its_channels",),
)
bug(
    "sglang#20611",
    "The copy to the host starts on its own stream before the forward pass has written the rows "
    "that it reads.",
    by=("copied_before_its_source_is_there",),
)
bug(
    "sglang#34025",
    "A page copy multiplies a page id and a stride in 32 bits, which wraps in a large pool.",
    by=("loc_in_32_bits",),
)
bug(
    "sglang#36966",
    "A kernel is handed the host address of registered memory, where it needs the device's alias.",
    missing="Addresses that name their address space: on a CPU there is only one.",
)
bug(
    "sglang#37633",
    "An illegal access under overlapped scheduling, taken for a race by its reporter.",
    missing="The report does not say which access of which step races.",
)
bug(
    "vllm#47671",
    "A block id times the page stride overflows 32 bits once the pool hands out high ids.",
    by=("loc_in_32_bits",),
)
bug(
    "vllm#56699",
    "A launch fails for good after many imports into the host pool beside decoding.",
    missing="The report shows a symptom and no cause.",
)

# bytes read in another form

bug(
    "LMCache#4247",
    "With KV groups of their own page ids, a packed layout is stored and loaded by the ids of one "
    "group for all.",
    by=("page_of_the_other_group",),
)
bug(
    "LMCache#4463",
    "A four-dimensional layout is taken for another of the same shape, so that a cache read back "
    "has the halves of its rows elsewhere.",
    by=("restored_in_another_layout",),
)
bug(
    "sglang#28971",
    "A digest of moved rows disagrees between prefill and decode.",
    missing="The report shows a symptom and no cause.",
)
bug(
    "sglang#31901",
    "Where KV rows go straight to the host, its page ids also name the device pages to which the "
    "index goes.",
    by=("host_pages_for_index_pages",),
)
bug(
    "sglang#36371",
    "The sender's bytes per item serve as the receiver's stride as well; with KV of another width "
    "at each end every item but the first lands elsewhere.",
    by=("items_of_another_width_are_refused",),
)
bug(
    "vllm#47783",
    "Blocks that hold something behind their rows have a longer stride; a kernel that multiplies "
    "the flat token number by the row alone reads elsewhere from the second block on.",
    by=("keys_read_flat",),
)
bug(
    "vllm#57019",
    "Several layers share an allocation, and the views of each begin at its start instead of at "
    "the layer's place in it.",
    by=("layers_at_one_offset",),
)
