// Makes a PyTorch without CUDA take `cuda` for a device it has, as far as tensors without data (FakeTensor) need: the
// autograd engine asks for streams and events, which do nothing here. To be loaded before torch is.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

using c10::Device;
using c10::DeviceIndex;
using c10::Stream;

struct Guard : c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> {
  Device getDevice() const override { return Device(c10::DeviceType::CUDA, 0); }
  Device exchangeDevice(Device) const override { return getDevice(); }
  Stream getStream(Device) const noexcept override { return Stream(Stream::DEFAULT, getDevice()); }
  Stream getDefaultStream(Device) const override { return Stream(Stream::DEFAULT, getDevice()); }
  Stream getNewStream(Device, int = 0) const override { return Stream(Stream::DEFAULT, getDevice()); }
  Stream exchangeStream(Stream) const noexcept override { return Stream(Stream::DEFAULT, getDevice()); }
  void record(void** event, const Stream&, const DeviceIndex, const c10::EventFlag) const override { *event = nullptr; }
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
  void synchronizeEvent(void*) const override {}
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override {}
};

static Guard guard;
static c10::impl::DeviceGuardImplRegistrar registrar(c10::DeviceType::CUDA, &guard);

struct Hooks : at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex getCurrentDevice() const override { return 0; }
};

namespace at {
C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, ::Hooks)
}
