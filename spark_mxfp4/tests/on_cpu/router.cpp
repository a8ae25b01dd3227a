// The router's kernels on a CPU, through the same structure and variant numbers as router.cu's door.
#include "router.cuh"  // the test puts a copy beside this folder's headers

using namespace spark;

template <class V>
int cluster(const Router& r) {
  const int blocks = (r.experts + 8 * V::TILES - 1) / (8 * V::TILES);
  return cpu::launch(blocks, V::WARPS * 32, V::bytes(blocks), [&] { route_by_cluster<V>(r); });
}
template <class V>
int ticket(const Router& r) {
  const int units = (r.columns + 31) / 32, slices = (units + V::WARPS * V::UNITS - 1) / (V::WARPS * V::UNITS);
  return cpu::launch((r.experts + 7) / 8 * slices, V::WARPS * 32, V::bytes(), [&] { route_by_ticket<V>(r, slices); });
}
template <int UNITS, int TILES>
int cluster_of(const Router& r) {
  return r.tokens <= 8 ? cluster<OneCluster<1, UNITS, TILES, 32>>(r) : cluster<OneCluster<2, UNITS, TILES, 32>>(r);
}
template <int UNITS>
int ticket_of(const Router& r) {
  return r.tokens <= 8 ? ticket<ByTicket<1, UNITS, 12>>(r) : ticket<ByTicket<2, UNITS, 12>>(r);
}

extern "C" int route_on_cpu(const Router* r, int variant) {
  using Runner = int (*)(const Router&);
  constexpr Runner RUNNERS[] = {cluster_of<3, 1>, cluster_of<3, 2>, cluster_of<6, 1>, ticket_of<1>,
                                ticket_of<2>,     ticket_of<4>,     ticket_of<8>};
  return RUNNERS[variant](*r);
}
