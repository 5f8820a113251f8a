// A group of MLX whose gathers are calls of this program, as operations of MLX's graph. It is part
// of the C layer; `crates/mlx/src/group.rs` calls it. Handles are those of mlx-c: structures of one
// pointer, to an array or a stream of MLX.
#include <cstddef>
#include <exception>
#include <functional>
#include <memory>
#include <stdexcept>

#include "mlx/array.h"
#include "mlx/backend/cpu/encoder.h"
#include "mlx/distributed/distributed.h"
#include "mlx/distributed/distributed_impl.h"
#include "mlx/distributed/ops.h"
#include "mlx/stream.h"
#include "mlx/utils.h"

namespace {

namespace mx = mlx::core;
namespace md = mlx::core::distributed;

struct Handle {
  void* ctx;
};

// Gathers the parts of all ranks; 0 if it has them.
using Exchange = int (*)(void* payload, const void* own, size_t own_bytes, void* all, size_t all_bytes);

class PacelineGroup : public md::detail::GroupImpl {
 public:
  PacelineGroup(int rank, int size, Exchange exchange, void* payload, void (*drop)(void*))
      : rank_(rank), size_(size), exchange_(exchange), payload_(payload, drop) {}

  // Exchanges are work of the processor, whatever computes the parts.
  mx::Stream communication_stream(mx::StreamOrDevice s) override {
    auto stream = mx::to_stream(s, mx::Device::cpu);
    return stream.device == mx::Device::cpu ? stream : mx::default_stream(mx::Device::cpu);
  }

  int rank() override { return rank_; }
  int size() override { return size_; }

  void all_gather(const mx::array& input, mx::array& output, mx::Stream stream) override {
    auto& encoder = mx::cpu::get_command_encoder(stream);
    encoder.set_input_array(input);
    encoder.set_output_array(output);
    // The payload lives until the last exchange has taken place.
    encoder.dispatch([exchange = exchange_, payload = payload_, own = input.data<char>(),
                      own_bytes = input.nbytes(), all = output.data<char>(),
                      all_bytes = output.nbytes()] {
      if (exchange(payload.get(), own, own_bytes, all, all_bytes)) {
        throw std::runtime_error("[paceline] an exchange with other ranks failed");
      }
    });
  }

  std::shared_ptr<GroupImpl> split(int, int) override { throw refused(); }
  void all_sum(const mx::array&, mx::array&, mx::Stream) override { throw refused(); }
  void all_max(const mx::array&, mx::array&, mx::Stream) override { throw refused(); }
  void all_min(const mx::array&, mx::array&, mx::Stream) override { throw refused(); }
  void sum_scatter(const mx::array&, mx::array&, mx::Stream) override { throw refused(); }
  void send(const mx::array&, int, mx::Stream) override { throw refused(); }
  void recv(mx::array&, int, mx::Stream) override { throw refused(); }

 private:
  static std::runtime_error refused() {
    return std::runtime_error("[paceline] this group gathers only");
  }

  int rank_;
  int size_;
  Exchange exchange_;
  std::shared_ptr<void> payload_;
};

} // namespace

// A group; `drop` frees the payload. Null if that fails.
extern "C" void* paceline_group_new(int rank, int size, Exchange exchange, void* payload, void (*drop)(void*)) {
  try {
    return new md::Group(std::make_shared<PacelineGroup>(rank, size, exchange, payload, drop));
  } catch (const std::exception&) {
    return nullptr;
  }
}

extern "C" void paceline_group_free(void* group) {
  delete static_cast<md::Group*>(group);
}

// The parts of all ranks one after the other along the first axis; 0 if the operation was noted.
extern "C" int paceline_group_all_gather(Handle* out, void* group, Handle part, Handle stream) {
  try {
    auto all = md::all_gather(
        *static_cast<mx::array*>(part.ctx), *static_cast<md::Group*>(group),
        *static_cast<mx::Stream*>(stream.ctx));
    if (out->ctx) {
      *static_cast<mx::array*>(out->ctx) = std::move(all);
    } else {
      out->ctx = new mx::array(std::move(all));
    }
    return 0;
  } catch (const std::exception&) {
    return 1;
  }
}
