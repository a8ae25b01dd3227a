// The arguments that Python passes to the kernels. extension.py parses these structs, so each line may only declare
// members of one type; a comment may follow on the same line.
#pragma once
#include <cuda_bf16.h>
#include <cstdint>

namespace spark {

struct Routing {
  const void* ids;        // int32 or int64 [pairs]: the routing table, flattened
  const int32_t* map;     // [global experts]: local expert, or -1 if it is on another device; null: all are local
  int ids_are_64_bit;
  int pairs, top_k, experts, global_experts;
  int tile_tokens;        // most tokens of a tile
  int row_multiple;       // each expert's first row is a multiple of this
  int32_t* row_of_pair;   // [pairs]; -1 if the expert is on another device
  int32_t* token_of_row;  // [rows]
  int4* tiles;            // {expert, first row, tokens, 0}
  int32_t* tile_count;    // [1]
};

// Arguments of the kernels that reorder the columns of activations for the first product; see pair_at.
struct Ordering {
  const uint4* x;  // [tokens][vectors], eight columns per vector
  uint4* ordered;  // [tokens][chunks of 64 columns][8], or planes; zeros after the last column; null: no reordering
  int tokens, vectors, chunks;
};

struct Gemm {
  const uint8_t* weight;     // [experts][row tiles][chunks][CHUNK_BYTES], see layout.py
  const float* bias;         // [experts][row tiles · 64], rows in the order of the weights
  const uint8_t* x;          // planes [chunks][rows][PLANE_BYTES]; if the shape GATHERS: [tokens][chunks][PLANE_BYTES]
  __nv_bfloat16* out;        // SWIGLU: planes [row tiles / 2][rows][PLANE_BYTES]; else [rows][columns]
  const int32_t* token_of_row;  // [rows]; read if the shape GATHERS
  const int4* tiles;
  const int32_t* tile_count;
  int chunks, row_tiles, columns;
  int64_t rows;
  float alpha, limit, shift;  // parameters of the activation; 1, infinity and 0 give SwiGLU with plain SiLU
};

// Activations as rows of 16-byte vectors.
struct Input {
  const uint8_t* at;
  int64_t stride;  // bytes from one row to the next
  int vectors;     // per row
};

struct Layer {
  Gemm first, second;     // second.out is the layer's result [tokens][columns]
  Routing routing;
  Input x, hidden;        // x has a row per token; hidden has a row per pair and is first.out
  float* partial;         // [rows][parts][second.row_tiles · 64]
  int32_t* taken;         // [1]: counter of the work items that blocks have taken
  const float* shares;    // [pairs]: the weight of each pair in its token's sum
  int sorted;             // 1: an earlier kernel has sorted the pairs; its results are in `routing`
  int parts, part_chunks, tokens, top_k;
  int first_at_once, second_at_once;  // most stages of weights in flight, in the first and in the second product
};

struct Linear {
  const uint8_t* weight;         // [tiles][chunks][chunk bytes], see linear.py
  const float* row_scales;       // FP8: [tiles · 16]
  const __nv_bfloat16* bias;     // [rows] or null
  const __nv_bfloat16* x;        // [tokens][x_stride]
  __nv_bfloat16* out;            // [tokens][rows]
  int tokens, rows, columns, chunks, tiles, token_groups;
  int64_t x_stride;
};

struct Router {
  const __nv_bfloat16* weight;  // [experts][columns]
  const __nv_bfloat16* bias;    // [experts] or null
  const __nv_bfloat16* x;       // [tokens][x_stride]
  const uint8_t* padding;       // [tokens] or null; 1: the token is padding and gets expert -1
  float* shares;                // [tokens][top_k]
  int32_t* ids;                 // [tokens][top_k]
  float* parts;                 // route_by_ticket: [slices][tokens][experts]
  unsigned* ticket;             // route_by_ticket: [1], 0 before and after every launch
  int tokens, experts, columns, top_k;
  int64_t x_stride;
};

struct Attention {
  const __nv_bfloat16* query;   // [tokens][query_stride]; the heads of a token are contiguous, as in key and value
  const __nv_bfloat16* key;     // [tokens][key_stride]
  const __nv_bfloat16* value;   // [tokens][value_stride]
  __nv_bfloat16* cache;         // 128 numbers per token and key head: the key, then the value
  const int32_t* table;         // [tokens][table_stride]: numbers of the cache blocks of each sequence
  const int32_t* lengths;       // [tokens]: tokens of the sequence, the new one included; 0 for padding
  const int64_t* slots;         // [tokens]: block · block_size + position in block; negative: the token is not stored
  const __nv_bfloat16* sinks;   // [query heads] or null
  const float* rotation;        // [positions][64]: cosines, then sines; null: query and key are rotated already
  __nv_bfloat16* output;        // [tokens][query heads][64]
  float* parts;                 // [tokens][key heads][splits][ATTENTION_PART]
  unsigned* tickets;            // [tokens][key heads], 0 before and after every launch
  int tokens, key_heads, group, splits;  // group: query heads per key head
  int least, window, block_size;         // least: fewest steps of a split; window: tokens, 0 for all
  int64_t query_stride, key_stride, value_stride, table_stride, cache_block, cache_head, cache_token;
  float scale;
};

struct Rotation {
  const __nv_bfloat16* query;  // [tokens][query_stride]
  const __nv_bfloat16* key;    // [tokens][key_stride]
  const __nv_bfloat16* value;  // [tokens][value_stride]
  __nv_bfloat16* cache;        // as in Attention
  const int32_t* starts;       // [sequences + 1]: the first token of each sequence
  const int32_t* lengths;      // [sequences]: tokens of each, the new ones included
  const int64_t* slots;        // [tokens]
  const float* rotation;       // [positions][64]
  __nv_bfloat16* output;       // [tokens][query heads][64]: the rotated query
  int tokens, sequences, query_heads, key_heads, block_size;
  int64_t query_stride, key_stride, value_stride, cache_block, cache_head, cache_token;
};

struct Norm {
  const __nv_bfloat16* x;         // [tokens][columns]
  const __nv_bfloat16* residual;  // [tokens][columns]
  const __nv_bfloat16* weight;    // [columns]
  __nv_bfloat16* output;          // [tokens][columns]
  __nv_bfloat16* sum;             // [tokens][columns]: the next residual
  int tokens, columns;
  float epsilon;
};

struct Peers {           // the GPUs of one host, whose parts of a layer's input are added up
  const int64_t* boxes;  // [ranks]: addresses of their inboxes, see norm.cuh
  int* buffers;          // [tokens]: which of the inbox's three buffers the next launch uses
  int ranks, rank;
};

}  // namespace spark
