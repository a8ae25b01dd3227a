// Both products and the weighted sum in one launch, for few tokens: the copies of weights hardly ever stop.
//
// Work comes in items: ROW_GROUPS tiles of 64 weight rows by up to 8 tokens of one expert, over all columns for the first
// product, over one of `parts` for the second. Blocks take items from a common counter, all of the first product before
// those of the second. In each block one thread brings weights and waits for hardly anything but room in the ring;
// another brings activations, those of the second product as soon as their expert's first product is stored; a third
// tells the other blocks what this one has stored. Parts are stored as float32 and added up at the end, always in the
// same order, whoever computed them. Blocks wait for each other, so all must run at once: the launch is cooperative.
#pragma once
#include "gemm.cuh"

namespace spark {

struct Layer {
  Gemm first, second;     // second.x is first.out; second.out is the layer's result [tokens][columns]
  float* partial;         // [rows][parts][second.row_tiles · 64]
  int32_t* counters;      // zeros at first; [most_tiles]: how many row tiles of the first product are stored for a tile;
                          // [second.row_tiles]: how many parts are stored of all tiles; [1]: how many items are taken
  const int32_t* row_of_pair;
  const float* shares;    // [pairs]
  int most_tiles, parts, part_chunks, tokens, top_k;
};

int layer(const Layer* l, int narrow, int processors, cudaStream_t stream);
int layer_chunks(int narrow);  // of one stage
int layer_rows(int narrow);    // of 64, of one item

constexpr int FEW_TOKENS = 8;  // most tokens of a tile
constexpr int FEW_TILES = 32;  // as many as sort_few finds

struct Item {
  Tile tile;
  int number;      // of the tile
  int begin, end;  // chunks; no more items where end is 0
  int part;
  bool second;
};

// A block's items in turn, and how far each is: pushed by who brings weights, stored by who multiplies, published.
// Nobody is more than QUEUE items ahead, so a barrier's parity tells its phases apart.
constexpr int QUEUE = 8;
struct Queue {
  Item items[QUEUE];
  uint64_t pushed[QUEUE], stored[QUEUE], published[QUEUE];

  static __device__ uint32_t bar(const uint64_t* of, int number) { return shared_address(of + number % QUEUE); }
  static __device__ void wait(const uint64_t* of, int number) { barrier_wait(bar(of, number), number / QUEUE & 1); }

  __device__ void init(int storing_warps) {
    for (int i = 0; i < QUEUE; ++i) {
      barrier_init(bar(pushed, i), 1);
      barrier_init(bar(stored, i), storing_warps);
      barrier_init(bar(published, i), 1);
    }
  }
  __device__ void push(const Item& item, int number) {
    if (number >= QUEUE) wait(published, number - QUEUE);
    items[number % QUEUE] = item;
    barrier_arrive(bar(pushed, number));
  }
  __device__ const Item& pull(int number) const {
    wait(pushed, number);
    return items[number % QUEUE];
  }
};

template <class S>
__device__ __forceinline__ int row_blocks(const Gemm& g) { return (g.row_tiles + S::ROW_GROUPS - 1) / S::ROW_GROUPS; }

// The item of that index, those of the first product before those of the second; false behind the last.
template <class S>
__device__ __forceinline__ bool item_at(const Layer& l, const int4* tiles, int tile_count, int index, Item& item) {
  const int blocks = row_blocks<S>(l.first), firsts = tile_count * blocks;
  item.second = index >= firsts, item.part = 0;
  if (item.second) {
    const int seconds = row_blocks<S>(l.second), of_tile = seconds * l.parts, rest = (index - firsts) % of_tile;
    item.number = (index - firsts) / of_tile;
    if (item.number >= tile_count) return false;
    item.part = rest / seconds, item.tile.row_tile = rest % seconds * S::ROW_GROUPS;
  } else {
    item.number = index / blocks, item.tile.row_tile = index % blocks * S::ROW_GROUPS;
  }
  item.tile.tokens = tiles[item.number];
  item.begin = item.part * l.part_chunks;
  item.end = item.second ? min(item.begin + l.part_chunks, l.second.chunks) : l.first.chunks;
  return true;
}

// The tokens there are, not eight: what is in the ring's other rows reaches other columns of the result only.
template <class S>
__device__ Copies<S> copies_of(const Layer& l, const Item& item, uint64_t policy) {
  Copies<S> copies(item.second ? l.second : l.first, item.tile, policy, policy);
  copies.chunks = item.end, copies.x_bytes = item.tile.tokens.z * PLANE_BYTES;
  return copies;
}

// Until the first product of a tile is stored, whole.
__device__ __forceinline__ void wait_for_tile(const Layer& l, int number) {
  while (load_acquire(l.counters + number) < l.first.row_tiles) {}
}

// Takes items until there are none.
template <class S>
__device__ void bring_weights(const Layer& l, Ring<S> ring, Queue& queue, const int4* tiles, int tile_count) {
  const uint64_t once = leave_first();
  int32_t* taken = l.counters + l.most_tiles + l.second.row_tiles;
  int index = blockIdx.x, number = 0;
  for (Item item; item_at<S>(l, tiles, tile_count, index, item); ++number) {
    queue.push(item, number);
    const Copies<S> copies = copies_of<S>(l, item, once);
    const bool early = number > 0 && !item.second;  // the answer takes a while
    int next = early ? atomicAdd(taken, 1) : 0;
    for (int chunk = item.begin; chunk < item.end; chunk += S::CHUNKS, ring.next()) {
      barrier_wait(ring.empty_bar(ring.stage), ring.parity ^ 1);
      copies.weights(ring, chunk);
    }
    if (!early) {
      wait_for_previous_kernel();  // which set the counters to zero
      if (item.second) wait_for_tile(l, item.number);  // or some blocks would take several while others have none
      next = atomicAdd(taken, 1);
    }
    index = gridDim.x + next;
  }
  barrier_wait(ring.empty_bar(ring.stage), ring.parity ^ 1);
  queue.push(Item{}, number);
  barrier_arrive(ring.full_bar());
}

template <class S>
__device__ void bring_activations(const Layer& l, Ring<S> ring, const Queue& queue) {
  const uint64_t keep = leave_last();
  wait_for_previous_kernel();
  int ready = -1;
  for (int number = 0;; ++number) {
    const Item item = queue.pull(number);
    if (item.end == 0) return;
    if (item.second && item.number != ready) {
      wait_for_tile(l, item.number);
      fence_copies();  // others' stores are seen by this thread's copies from here on
      ready = item.number;
    }
    const Copies<S> copies = copies_of<S>(l, item, keep);
    for (int chunk = item.begin; chunk < item.end; chunk += S::CHUNKS, ring.next()) {
      barrier_wait(ring.empty_bar(ring.stage), ring.parity ^ 1);
      copies.activations(ring, chunk);
    }
  }
}

// Tells the other blocks what this one has stored, so that nobody who multiplies waits for memory.
template <class S>
__device__ void publish(const Layer& l, Queue& queue) {
  wait_for_previous_kernel();
  for (int number = 0;; ++number) {
    const Item item = queue.pull(number);
    if (item.end == 0) return;
    Queue::wait(queue.stored, number);
    __threadfence();
    const Gemm& g = item.second ? l.second : l.first;
    const int groups = min(S::ROW_GROUPS, g.row_tiles - item.tile.row_tile);
    if (item.second) {
      for (int i = 0; i < groups; ++i) atomicAdd(l.counters + l.most_tiles + item.tile.row_tile + i, 1);
    } else {
      atomicAdd(l.counters + item.number, groups);
    }
    barrier_arrive(Queue::bar(queue.published, number));
  }
}

// Multiply one item: leaves this warp's sums in `sum`, 16 rows by 8 tokens, and the ring behind the item's last chunk.
template <class S>
__device__ __forceinline__ void multiply_item(int chunks, Ring<S>& ring, int group, int split, float (&sum)[4]) {
  const int thread = threadIdx.x & 127, lane = threadIdx.x & 31, token = lane / 4, half = (token & 1) * 64;
  const int first_part = split * S::STEP;
  // This thread's places in the ring's first stage.
  const uint32_t values = shared_address(ring.w) + (group * S::CHUNKS + first_part) * CHUNK_BYTES + 16 * thread;
  const uint32_t scales = values - 16 * thread + VALUE_BYTES + 2 * (thread >> 1);
  const uint32_t x = ring.x + (first_part * FEW_TOKENS + token) * PLANE_BYTES + (lane & 3) * 16 + half;
  float even[4] = {}, odd[4] = {};  // sums of every other step, so that none waits for the one before
  const auto one_chunk = [&](uint32_t w_at, uint32_t x_at) {
    uint32_t words[4], factor[2], b[2][4];
    load_shared(words, values + w_at);
    scale_pairs(load_shared_16(scales + w_at), factor);
    load_shared(b[0], x + x_at);
    load_shared(b[1], (x ^ 64) + x_at);
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      uint32_t a[4];
      expand_word(words[step], a);
#pragma unroll
      for (int i = 0; i < 4; ++i) a[i] = multiply(a[i], factor[i & 1]);
      mma(step & 1 ? odd : even, a, b[step / 2][step % 2 * 2], b[step / 2][step % 2 * 2 + 1]);
    }
  };
  for (int chunk = 0; chunk < chunks; chunk += S::CHUNKS, ring.next()) {
    const uint32_t w_at = ring.stage * S::W_BYTES, x_at = ring.stage * S::X_BYTES;
    barrier_wait(ring.full_bar(), ring.parity);
    if (chunk + first_part + S::STEP <= chunks) {
#pragma unroll
      for (int u = 0; u < S::STEP; ++u) one_chunk(w_at + u * CHUNK_BYTES, x_at + u * FEW_TOKENS * PLANE_BYTES);
    } else {  // the item's last stage has fewer chunks
      for (int u = 0; u < chunks - chunk - first_part; ++u)
        one_chunk(w_at + u * CHUNK_BYTES, x_at + u * FEW_TOKENS * PLANE_BYTES);
    }
    __syncwarp();
    if (lane == 0) barrier_arrive(ring.empty_bar(ring.stage));
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) sum[i] = even[i] + odd[i];
}

// As gemm.cuh's store_swiglu, with the columns in the order of routing.cuh's copy_row_in_fragments.
__device__ __forceinline__ void store_hidden(const Gemm& g, const Tile& tile, int row_tile, const float (&sum)[4],
                                             const float (&bias)[2]) {
  const int lane = threadIdx.x & 31, warp = (threadIdx.x >> 5) & 3, token = lane / 4;
  const float low = activation(sum[0] + bias[0], sum[2] + bias[1], g);
  const float high = activation(sum[1] + bias[0], sum[3] + bias[1], g);
  const uint32_t pair = transpose_8x8(pack(low, high));
  const int vector = ((warp >> 1) ^ (token & 1)) * 4 + (row_tile & 1) * 2 + (lane >> 1 & 1);
  uint8_t* plane = reinterpret_cast<uint8_t*>(g.out) + (int64_t{row_tile / 2} * g.rows + tile.tokens.y) * PLANE_BYTES;
  uint8_t* to = plane + token * PLANE_BYTES + vector * 16 + (warp & 1) * 8 + (lane & 1) * 4;
  if (token < tile.tokens.z) *reinterpret_cast<uint32_t*>(to) = pair;
}

__device__ __forceinline__ void store_part(const Layer& l, const Item& item, int row_tile, const float (&sum)[4],
                                           const float (&bias)[2]) {
  const int lane = threadIdx.x & 31, warp = (threadIdx.x >> 5) & 3, token = (lane & 3) * 2;
  const int64_t width = l.second.row_tiles * 64, next = l.parts * width;
  float* to = l.partial + item.tile.tokens.y * next + item.part * width + row_tile * 64 + warp * 16 + lane / 4;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (token + i >= item.tile.tokens.z) continue;
    to[(token + i) * next] = sum[i] + bias[0];
    to[(token + i) * next + 8] = sum[i + 2] + bias[1];
  }
}

// Eight tokens' 64 columns of the result from all parts, by one warpgroup: four columns for each thread.
__device__ __forceinline__ void add_parts(const Layer& l, int row_tile, int first_token) {
  constexpr int AT_ONCE = 8;
  const int thread = threadIdx.x & 127, column = row_tile * 64 + (thread & 15) * 4, token = first_token + thread / 16;
  const int64_t width = l.second.row_tiles * 64;
  if (column >= l.second.columns || token >= l.tokens) return;
  float4 sum = {};
  for (int first = 0; first < l.top_k * l.parts; first += AT_ONCE) {
    float4 values[AT_ONCE];
    float factors[AT_ONCE];
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
      const int pair = token * l.top_k + (first + i) / l.parts;
      const int row = first + i < l.top_k * l.parts ? l.row_of_pair[pair] : -1;
      values[i] = {}, factors[i] = 0;
      if (row < 0) continue;
      factors[i] = l.shares[pair];
      values[i] = __ldcg(reinterpret_cast<const float4*>(
          l.partial + (int64_t{row} * l.parts + (first + i) % l.parts) * width + column));
    }
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
      sum.x += factors[i] * values[i].x, sum.y += factors[i] * values[i].y;
      sum.z += factors[i] * values[i].z, sum.w += factors[i] * values[i].w;
    }
  }
  const uint2 four = {pack(sum.x, sum.y), pack(sum.z, sum.w)};
  *reinterpret_cast<uint2*>(l.second.out + int64_t{token} * l.second.columns + column) = four;
}

template <class S>
__device__ __forceinline__ void work(const Layer& l, Ring<S>& ring, const Item& item, float* sums, uint32_t stored) {
  const Gemm& g = item.second ? l.second : l.first;
  const int warpgroup = uniform(threadIdx.x >> 7), thread = threadIdx.x & 127;
  const int group = warpgroup / S::SPLIT, split = warpgroup % S::SPLIT, row_tile = item.tile.row_tile + group;
  const bool there = row_tile < g.row_tiles;
  const float* from = g.bias + (int64_t{item.tile.tokens.x} * g.row_tiles + (there ? row_tile : 0)) * 64;
  const int row = (thread >> 5) * 16 + (thread & 31) / 4;
  const float bias[2] = {item.part == 0 ? from[row] : 0, item.part == 0 ? from[row + 8] : 0};
  float sum[4];
  multiply_item<S>(item.end - item.begin, ring, group, split, sum);
  if (!combine<S, FEW_TOKENS>(sum, sums, group, split)) return;
  if (there && item.second) store_part(l, item, row_tile, sum, bias);
  if (there && !item.second) store_hidden(g, item.tile, row_tile, sum, bias);
  __syncwarp();
  if ((thread & 31) == 0) barrier_arrive(stored);
}

template <class S>
constexpr int LAYER_THREADS = S::GROUPS * 128 + 96;  // and three warps of which one thread works

template <class S>
__global__ void __launch_bounds__(LAYER_THREADS<S>, S::BLOCKS) whole_layer(const __grid_constant__ Layer l) {
  static_assert(S::TOKENS == FEW_TOKENS && S::REGISTERS == 0);
  extern __shared__ uint8_t raw[];
  __shared__ int4 few_tiles[FEW_TILES];
  __shared__ Queue queue;
  __shared__ int32_t few, few_count;
  uint8_t* base = raw + ((1024 - (shared_address(raw) & 1023)) & 1023);
  Ring<S> ring(base);
  constexpr int COPIER = S::GROUPS * 128;  // the first thread that does not multiply
  if (threadIdx.x == 0) {
    for (int i = 0; i < S::STAGES; ++i) {
      barrier_init(ring.full + 8 * i, 1);
      barrier_init(ring.empty_bar(i), 4 * S::GROUPS);
    }
    queue.init(4 * S::ROW_GROUPS);
    fence_barriers();
  }
  if (threadIdx.x >= COPIER && threadIdx.x < COPIER + 32) {
    // With few pairs the tiles are known before the kernel that sorts has ended, and weights are on their way already.
    Sorted s;
    const bool sorted = sort_few(l.first.routing, s);
    if (sorted && s.first) few_tiles[s.tile] = make_int4(s.expert, s.first_row, s.tokens, 0);
    const int count = __popc(__ballot_sync(~0u, sorted && s.first));
    if (threadIdx.x == COPIER) few = sorted, few_count = count;
  }
  __syncthreads();
  if (!few) wait_for_previous_kernel();  // which wrote the tiles
  const int tile_count = few ? few_count : *l.first.tile_count;
  if (threadIdx.x >= COPIER) {
    if (threadIdx.x == COPIER) bring_weights<S>(l, ring, queue, few ? few_tiles : l.first.tiles, tile_count);
    if (threadIdx.x == COPIER + 32) bring_activations<S>(l, ring, queue);
    if (threadIdx.x == COPIER + 64) publish<S>(l, queue);
    return;
  }
  wait_for_previous_kernel();
  let_next_kernel_start();
  float* sums = reinterpret_cast<float*>(base + S::STAGES * (S::X_BYTES + S::W_BYTES + 16));
  for (int number = 0;; ++number) {
    barrier_wait(ring.full_bar(), ring.parity);
    const Item item = queue.items[number % QUEUE];
    if (item.end == 0) break;
    work<S>(l, ring, item, sums, Queue::bar(queue.stored, number));
  }
  const int groups = (l.tokens + 7) / 8;
  for (int unit = blockIdx.x * S::GROUPS + (threadIdx.x >> 7); unit < l.second.row_tiles * groups;
       unit += gridDim.x * S::GROUPS) {
    const int row_tile = unit / groups;
    while (load_acquire(l.counters + l.most_tiles + row_tile) < tile_count * l.parts) __nanosleep(20);
    add_parts(l, row_tile, unit % groups * 8);
  }
}

}  // namespace spark
